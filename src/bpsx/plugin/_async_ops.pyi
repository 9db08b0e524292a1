from collections.abc import Mapping, Sequence

from bpsx.plugin.steps import Step

class OwnedMemory: ...

class CallPlan:
    @property
    def step(self) -> Step | None: ...
    def __init__(
        self,
        names: Sequence[str],
        priorities: Sequence[int],
        average: bool,
        root: int,
        dtypes: Mapping[int, str],
        step: Step | None = None,
    ) -> None: ...
