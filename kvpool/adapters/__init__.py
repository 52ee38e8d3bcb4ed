"""Glue between kvpool and serving frameworks, one module per framework. Nothing in kvpool imports them."""
