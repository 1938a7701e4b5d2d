"""Why Dynamo ended a graph although the program goes on."""

from torch.fx import GraphModule


def why_ended(gm: GraphModule) -> str:
    """Dynamo's reason for the graph break that ended ``gm``, and where it is; ``""`` if the program returned."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return ""
    what, *more = [line.strip() for line in str(reason.reason).strip().splitlines()]
    explained = [line.removeprefix("Explanation: ") for line in more if line.startswith("Explanation: ")]
    where = f"{reason.user_stack[-1].filename}:{reason.user_stack[-1].lineno}: " if reason.user_stack else ""
    return where + (explained or [what])[0]
