from typing import Any

FAULTS: dict[str, tuple[Any, ...]]

def broken(fault: str) -> Any: ...
