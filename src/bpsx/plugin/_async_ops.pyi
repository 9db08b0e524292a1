from collections.abc import Mapping, Sequence

class Kept: ...

class CallPlan:
    def __init__(
        self,
        names: Sequence[str],
        priorities: Sequence[int],
        average: bool,
        root: int,
        dtypes: Mapping[int, str],
    ) -> None: ...
