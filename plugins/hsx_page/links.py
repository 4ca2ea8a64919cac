"""A link from each task of hsx to the page, made from the task's key alone: it works while the task runs, too."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from airflow.configuration import conf
from airflow.sdk import BaseOperator, BaseOperatorLink

from hsx_operators.disk import ApproveCleanupOperator, CleanupOldStatesOperator, DiskSpaceOperator
from hsx_operators.extraction import (
    ConvertFormatsOperator,
    ExtractShardOperator,
    ProbeOperator,
    TrainingHandoffOperator,
    VerifyDatasetOperator,
)
from hsx_operators.fleet import ReassignOperator, ShareOperator
from hsx_operators.plan import GateOperator, PlanOperator
from hsx_operators.sensors import ServerHealthSensor
from hsx_operators.servers import (
    AcquireHostOperator,
    ApplyPatchOperator,
    BenchmarkOperator,
    RestoreProductionOperator,
    StartServerOperator,
    StopServerOperator,
)
from hsx_operators.topup import TopUpOperator
from hsx_operators.verdict import VerdictOperator
from hsx_page.places import TITLE, page

if TYPE_CHECKING:
    from airflow.sdk.types import TaskInstanceKey


class PageLink(BaseOperatorLink):
    """The button "Hidden states" of a task: the page, at the task's run."""

    name = TITLE
    operators: ClassVar[list[type[BaseOperator]]] = [
        PlanOperator,
        TopUpOperator,
        DiskSpaceOperator,
        GateOperator,
        ApproveCleanupOperator,
        BenchmarkOperator,
        ShareOperator,
        AcquireHostOperator,
        StopServerOperator,
        ApplyPatchOperator,
        StartServerOperator,
        ServerHealthSensor,
        ProbeOperator,
        CleanupOldStatesOperator,
        ExtractShardOperator,
        VerifyDatasetOperator,
        ConvertFormatsOperator,
        RestoreProductionOperator,
        ReassignOperator,
        TrainingHandoffOperator,
        VerdictOperator,
    ]

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """The page at ``ti_key``'s run."""
        return page(ti_key.dag_id, ti_key.run_id, conf.get("api", "base_url", fallback=""))
