"""A profile of several hosts, and the DAG file as Airflow reads it with such a profile in its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from airflow.dag_processing.dagbag import DagBag

from hsx_operators import INCLUDE

REPO = Path(__file__).resolve().parents[3]


def body(**changes: Any) -> dict[str, Any]:
    """The reference profile on two hosts, the second with another port and tensor-parallel size."""
    loaded: dict[str, Any] = yaml.safe_load((INCLUDE / "profiles" / "kimi-k2.5.yaml").read_text())
    host = loaded.pop("host")
    own = {"production": {"port": 31000}, "extraction": {"flags": {"disable-radix-cache": True, "tp-size": 4}}}
    loaded["hosts"] = [{"name": "gpu1", **host}, {"name": "gpu2", **host, "ssh_conn_id": "hsx_gpu2", **own}]
    return {**loaded, **changes}


def write(folder: Path, name: str, document: Any) -> None:
    """Put a profile where ``HSX_PROFILES`` looks."""
    (folder / f"{name}.yaml").write_text(document if isinstance(document, str) else yaml.safe_dump(document))


def dag_bag() -> DagBag:
    """What Airflow makes of the DAG folder now."""
    bag = DagBag(dag_folder=str(REPO / "dags"))
    assert bag.import_errors == {}
    return bag
