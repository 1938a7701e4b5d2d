"""JSON and Model Explorer: the schemas hold, and nothing is lost."""

import json
from importlib.resources import files
from typing import Any

import pytest
from support.checks.json_schema import fits
from support.programs.show_samples import document, gpt, plain, tensor

from fxamp.graph_text import Document, Entry, KeptValue, Listing, RuleRef, Source
from fxamp.tools.show.findings import Finding, findings
from fxamp.tools.show.json_format import to_json
from fxamp.tools.show.model_explorer import to_model_explorer
from fxamp.tools.show.select import select

SCHEMA = json.loads((files("fxamp.tools.show") / "schema.json").read_text(encoding="utf-8"))

#: An entry and a listing of which no field has its default value.
FULL_ENTRY = Entry(
    name="n",
    kind="call_function",
    target="aten::mm.default",
    call="torch.mm(a)",
    inputs=("a",),
    values=(tensor("f16[s0, 2]"),),
    was=("f32",),
    symbol="s1",
    needs_grad=True,
    module="h.0",
    module_class="Block",
    source=Source("f.py", 3, "g", "x"),
    rule=RuleRef("r", "p.toml:1", "fp32", "why"),
    lost=(RuleRef("l"),),
    reason="reason",
    overruled="overruled",
    not_fp8="not in fp8",
    region="off",
    inserted="inserted",
    verbatim="verbatim",
    bodies=("body",),
)
FULL = Listing(
    name="G",
    entries=(FULL_ENTRY,),
    bodies={"body": Listing("body", ())},
    stage="cast",
    policy="p",
    device="cuda",
    chosen="chosen",
    counts={"shared": 0},
    unmatched=(RuleRef("u"),),
    ended="end",
    kept_before=0,
    kept_after=5,
    kept=(
        KeptValue("k", "aten::mm.default", "m", "f32", (2, "s0"), "int8/128", 8, 3, RuleRef("r", "p:1", "int8"), "why"),
    ),
)


@pytest.mark.parametrize(
    "doc", [document(), Document((FULL, plain()), ("w",)), Document(())], ids=["gpt", "full", "none"]
)
def test_json_follows_the_schema(doc: Document) -> None:
    text = to_json(doc, findings=[Finding("unmatched-rule", 0, "what", "advice", source=Source("f", 1, "g", "c"))])
    assert fits(json.loads(text), SCHEMA)
    assert not fits({**json.loads(text), "graph": []}, SCHEMA)


def test_every_field_of_a_listing_is_in_the_schema() -> None:
    node = json.loads(to_json(Document((FULL,))))["graphs"][0]
    assert set(node) == set(SCHEMA["$defs"]["graph"]["properties"])
    assert set(node["nodes"][0]) | {"bytes"} == set(SCHEMA["$defs"]["node"]["properties"])


def test_json_holds_numbers() -> None:
    graph = json.loads(to_json(document()))["graphs"][0]
    cast = next(node for node in graph["nodes"] if node["name"] == "norm_f16")
    assert cast["bytes"] == 256 * (4 + 2) and cast["values"][0]["shape"] == [2, 8, 16]
    assert "bytes" not in graph["bodies"]["wrap_body_0"]["nodes"][3]
    assert graph["kept_before"] == 4096 and graph["number"] == 0
    assert graph["totals"]["cast_bytes"] == 2 * 1536 + 1536 + 192
    assert graph["totals"]["casts_of_unknown_size"] == 1


def test_json_of_a_selection_keeps_bytes_and_the_way_to_the_bodies() -> None:
    graph = json.loads(to_json(document(), select(document(), only="casts")))["graphs"][0]
    assert [node["name"] for node in graph["nodes"]] == ["norm_f16", "w_f16", "checkpoint"]
    assert graph["nodes"][0]["bytes"] == 1536
    assert graph["totals"] == json.loads(to_json(document()))["graphs"][0]["totals"]
    assert [node["name"] for node in graph["bodies"]["wrap_body_0"]["nodes"]] == ["add_f16", "view", "mm_f32"]


def test_findings_are_in_the_json_only_when_asked_for() -> None:
    doc = Document((plain(),))
    assert "findings" not in json.loads(to_json(doc))
    (finding,) = json.loads(to_json(doc, findings=findings(select(doc).graphs)))["findings"]
    assert finding["kind"] == "float16-range" and finding["node"] == "exp"


#: The fields of Model Explorer's GraphCollection, Graph and GraphNode (input_graph.ts): required, then optional.
COLLECTION = ({"label": str, "graphs": list}, {})
GRAPH = ({"id": str, "nodes": list}, {"groupNodeAttributes": dict})
NODE = (
    {"id": str, "label": str, "namespace": str},
    {"subgraphIds": list, "attrs": list, "incomingEdges": list, "outputsMetadata": list, "style": dict},
)


def check(data: dict[str, Any], fields: tuple[dict[str, type], dict[str, type]]) -> None:
    required, optional = fields
    assert required.keys() <= data.keys() <= required.keys() | optional.keys()
    assert all(isinstance(value, (required | optional)[key]) for key, value in data.items())


def test_model_explorer_gets_a_collection_of_its_form() -> None:
    data = json.loads(to_model_explorer(document(), "gpt.py"))
    check(data, COLLECTION)
    assert [graph["id"] for graph in data["graphs"]] == ["graph 0", "graph 0/wrap_body_0"]
    for graph in data["graphs"]:
        check(graph, GRAPH)
        ids = [node["id"] for node in graph["nodes"]]
        assert len(ids) == len(set(ids))
        for node in graph["nodes"]:
            check(node, NODE)
            assert all(
                edge["sourceNodeId"] in ids and isinstance(edge["targetNodeInputId"], str)
                for edge in node["incomingEdges"]
            )
            assert all(set(attr) == {"key", "value"} and isinstance(attr["value"], str) for attr in node["attrs"])
            assert node["subgraphIds"] == (["graph 0/wrap_body_0"] if node["id"] == "checkpoint" else [])


def test_model_explorer_shows_modules_dtypes_and_casts() -> None:
    graph = json.loads(to_model_explorer(Document((gpt(),)), "gpt.py"))["graphs"][0]
    nodes = {node["id"]: node for node in graph["nodes"]}
    cast = nodes["norm_f16"]
    assert (cast["label"], cast["namespace"]) == ("cast f32 to f16", "h/0/attn")
    assert cast["style"].keys() == {"backgroundColor", "borderColor"}
    assert {"key": "bytes cast", "value": "1536"} in cast["attrs"]
    assert cast["outputsMetadata"] == [{"id": "0", "attrs": [{"key": "tensor_shape", "value": "f16[2, 8, 16]"}]}]
    assert nodes["linear"]["incomingEdges"][1]["sourceNodeId"] == "w_f16"
    assert nodes["x"]["namespace"] == "inputs"
    assert graph["groupNodeAttributes"]["h/0/attn"] == {"class": "gpt.Attention"}


@pytest.mark.parametrize(("call", "output"), [("split[2]", "2"), ("operator.getitem(split, 1)", "1"), ("odd", "0")])
def test_model_explorer_knows_which_result_an_edge_comes_from(call: str, output: str) -> None:
    split = Entry("split", "call_function", "aten::split.Tensor")
    pick = Entry("pick", "call_function", "_operator.getitem", call, ("split",))
    graph = json.loads(to_model_explorer(Document((Listing("G", (split, pick)),)), "g"))["graphs"][0]
    assert graph["nodes"][1]["incomingEdges"][0]["sourceNodeOutputId"] == output
