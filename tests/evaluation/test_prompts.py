"""The shipped prompts: short, of several kinds, each once."""

from compress.evaluation.prompts import load_prompts


def test_the_shipped_prompts() -> None:
    found = load_prompts("openings")
    assert found.name == "openings"
    assert len(found.prompts) == len(set(found.texts)) == 16
    kinds = [prompt.kind for prompt in found.prompts]
    assert {"question", "story", "code", "list", "chat"} <= set(kinds)
    assert len(set(kinds[:4])) == 4  # the report shows these
    assert all(5 < len(text) < 120 and text == text.rstrip(" ") for text in found.texts)
