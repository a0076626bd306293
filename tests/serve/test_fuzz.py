"""Whatever JSON comes, the answer is a success or a reason, and nothing is left in the server.

Bodies are drawn from the server's own OpenAPI schema; now and then a field is anything at all.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

REASONS = {400, 404, 413}
ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(st.characters(exclude_categories=())),  # halves of surrogate pairs, too
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=6,
)
# What makes most bodies get as far as the engine.
USUAL: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from(["stage-01", "stage-02", "stage-03", "stage-04"]),
    "max_tokens": st.integers(1, 12),
    "max_completion_tokens": st.integers(1, 12),
    "n": st.integers(1, 3),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.01, 1),
    "min_p": st.floats(0, 1),
    "seed": st.integers(0, 2**64 - 1),
    "role": st.sampled_from(["user", "assistant", "system", "developer"]),
    "content": st.text(max_size=20),
    "tokens": st.lists(st.integers(0, 300), max_size=20),
    "prompt": st.text(max_size=20) | st.lists(st.integers(3, 300), min_size=1, max_size=20),
    "logit_bias": st.dictionaries(st.integers(0, 300).map(str), st.floats(-100, 100), max_size=3),
}


def body(schema: dict[str, Any], of: dict[str, Any], usual: bool = False) -> st.SearchStrategy[Any]:
    """JSON that fits a schema. Its fields are often those of `USUAL`; with `usual`, all are."""
    if "$ref" in schema:
        return body(of[schema["$ref"].rpartition("/")[2]], of, usual)
    if "anyOf" in schema:
        return st.one_of([body(one, of, usual) for one in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kind = schema.get("type")
    if kind == "object" and "properties" in schema:
        fields, required = {}, set(schema.get("required", ()))
        for name, field in schema["properties"].items():
            valid = body(field, of, usual)
            if not usual:
                fields[name] = st.one_of([*[USUAL.get(name, valid)] * 3, valid])
            elif name in USUAL or name in required:
                fields[name] = USUAL.get(name, valid)
        required = {name: fields.pop(name) for name in required}
        return st.fixed_dictionaries(required, optional=fields)
    if kind == "array":
        items = body(schema.get("items", {}), of, usual)
        return st.lists(items, min_size=schema.get("minItems", usual), max_size=3)
    return {
        "string": st.text(max_size=20),
        "integer": st.integers(-1, 40),
        "number": st.floats(-3, 3),
        "boolean": st.booleans(),
        "null": st.none(),
        "object": st.dictionaries(st.text(max_size=5), st.floats(-3, 3), max_size=3),
    }.get(kind, ANYTHING)


def test_never_a_500_never_a_block(
    http: httpx2.Client, server: Any, pytestconfig: pytest.Config
) -> None:
    schema = http.get("/openapi.json").json()
    components = schema["components"]["schemas"]
    paths = {
        path: operation["post"]["requestBody"]["content"]["application/json"]["schema"]
        for path, operation in schema["paths"].items()
        if "post" in operation
    }
    assert len(paths) == 4
    seen: Counter[int] = Counter()
    examples = 3000 if pytestconfig.getoption("--long") else 150

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def fuzz(data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(sorted(paths)))
        usual = data.draw(st.booleans())
        sent = data.draw(body(paths[path], components, usual))
        if not usual and data.draw(st.integers(0, 3)) == 0:
            name = data.draw(st.sampled_from(sorted(sent)) | st.text(max_size=10))
            sent[name] = data.draw(ANYTHING)
        if path.startswith("/v1") and "max_completion_tokens" not in sent:
            sent.setdefault("max_tokens", 8)
        answer = http.post(
            path, content=json.dumps(sent), headers={"Content-Type": "application/json"}
        )
        seen[answer.status_code] += 1
        assert answer.status_code == 200 or answer.status_code in REASONS, answer.text
        if answer.status_code != 200:
            assert answer.json()["error"]["message"]

    fuzz()
    server.wait_until_idle()
    assert server.driver.error is None
    # Neither may be rare by chance.
    assert seen[200] > examples / 10 and seen[400] > examples / 10, seen
    print(dict(seen))
