"""Metal Shading Language sources; installed as `kvpool_backends.metal`.

Resources, not code: read them with ``importlib.resources.files("kvpool_backends.metal")``.
"""
