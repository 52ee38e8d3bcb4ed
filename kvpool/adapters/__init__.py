"""Glue between kvpool and serving frameworks, one module per framework. The core and backends import none."""
