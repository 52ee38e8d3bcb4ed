"""A simulated engine on a simulated device: late execution, asynchronous schedules, every read compared."""
