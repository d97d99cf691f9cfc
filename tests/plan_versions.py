"""What plan files said before."""

from __future__ import annotations

import json
from typing import Any

from hetjax.planner import Plan


def version_1(plan: Plan) -> dict[str, Any]:
    """What a file of version 1 says of a plan whose stages have one member each."""
    data = json.loads(json.dumps(plan.to_json_dict()))
    for pipeline in data["pipelines"]:
        pipeline["stages"] = [_of_one_submesh(stage) for stage in pipeline["stages"]]
    return {**data, "version": 1}


def _of_one_submesh(stage: dict[str, Any]) -> dict[str, Any]:
    (member,) = stage.pop("members")
    return {**stage, **member}
