"""Memory of Python that calls leave behind."""

import tracemalloc


def grown(step, times):
    """Bytes that Python holds more after so many steps, once its free lists have taken in what they leave."""
    tracemalloc.start()
    try:
        for _ in range(times):
            step()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(times):
            step()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
