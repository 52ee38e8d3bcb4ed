from proof.fuzz._fuzz import Driver

class GroupDriver(Driver):
    def read_more(self, tokens: int) -> None: ...
