from typing import Any

GROUP_FAULTS: dict[str, tuple[Any, ...]]

def broken_groups(fault: str) -> Any: ...
