"""The law of the package, read off its source: who may import whom, and what is written nowhere."""

import ast
import itertools
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

import compress
from compress.evaluation.fidelity import compare_logits, fidelity_rows
from compress.evaluation.metrics import METRICS
from compress.evaluation.speed_rows import POINT_METRICS
from compress.formats import FORMATS
from compress.formats.base import Format
from compress.methods import METHODS
from compress.methods.base import Method
from compress.models import FAMILIES
from compress.models.family import ModelFamily
from compress.runtimes import RUNTIMES
from compress.runtimes.base import Runtime
from compress.tables import resolve

assert compress.__file__
ROOT = Path(compress.__file__).parent

# The one import order: a module imports only from the lines above it, or to its left.
ORDER = """
errors files paths tables workers shards yaml_files
schemes numerics activations
evaluation evaluation.memory evaluation.metrics evaluation.text
methods methods.base methods.scale_search methods.rounding methods.rtn methods.gptq methods.awq methods.smoothquant
formats formats.base formats.compressed_tensors formats.gptq formats.awq formats.fp8 formats.dense
formats.gguf_header formats.gguf_bits formats.gguf_facts formats.gguf_words formats.gguf_file formats.gguf_values
formats.gguf
models models.family models.surgery
models.falcon models.gemma2 models.gemma3_text models.gpt2 models.gpt_neox models.llama models.mistral models.olmo2
models.opt models.phi3 models.qwen2 models.qwen3
models.files models.kinds models.frame models.structure models.hub_files models.packaged models.source
models.checkpoint models.words models.load models.shapes models.digest
calibration calibration.files calibration.tokens calibration.embedded calibration.hub_sets calibration.data
calibration.chain calibration.stats calibration.state calibration.walk
recipe plan_rows plan_checks plan plan_text
artifact
runtimes runtimes.base runtimes.hf runtimes.draw runtimes.kernels runtimes.crossover runtimes.packed
evaluation.intervals evaluation.significance evaluation.stream evaluation.prompts evaluation.suite evaluation.cost
evaluation.fidelity evaluation.worker evaluation.generation evaluation.greedy
evaluation.energy evaluation.machine evaluation.timing evaluation.speed_rows evaluation.speed
evaluation.likelihood evaluation.blockwise evaluation.compare evaluation.accuracy
evaluation.report evaluation.rows evaluation.table evaluation.marks evaluation.speed_charts evaluation.charts
evaluation.draw evaluation.figures evaluation.beside evaluation.page evaluation.card
verify keys evaluation.questions evaluation.continuations job windows measure pipeline decoded judge comparison convert
__init__
cli __main__
""".split()  # noqa: SIM905  # a page of names reads better without quotes
MODULES = ["compress" if name == "__init__" else f"compress.{name}" for name in ORDER]

# Where a library may be imported: files, or folders with "/".
LIBRARIES = {
    "accelerate": ["models/"],
    "altair": ["evaluation/charts.py", "evaluation/draw.py", "evaluation/marks.py"],
    "compressed_tensors": ["formats/compressed_tensors.py"],
    "datasets": ["calibration/hub_sets.py"],
    "gguf": ["formats/gguf", "models/packaged.py"],
    "greenlet": ["calibration/walk.py"],
    "jsonschema": ["evaluation/report.py"],
    "lm_eval": ["evaluation/accuracy.py"],
    "rich": ["cli.py"],
    "tokenizers": ["models/", "runtimes/"],
    "transformers": ["models/", "runtimes/"],
    "vl_convert": ["evaluation/draw.py"],
}
PICKLERS = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
SEEDING = re.compile(
    r"\b(torch(\.\w+)?\.(manual_seed(_all)?|seed)|random\.seed|np\.random\.seed|numpy\.random\.seed"
    r"|set_seed|seed_everything|seed_all)\("
)
GLOBAL_DRAWS = re.compile(r"\b(random\.(?!Random\b)\w+|(np|numpy)\.random\.(?!default_rng\b|Generator\b)\w+)\(")
TORCH_DRAWS = re.compile(r"torch\.(rand|randn|randint|randperm|multinomial|bernoulli|normal)$")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(SOURCES[module].read_text(encoding="utf-8"))


def code(node: ast.AST) -> str:
    """The source of one statement or expression; texts are left out, they are no code."""
    return re.sub(r"'(\\.|[^'\\\n])*'", "''", ast.unparse(node))


def imports(parsed: ast.Module) -> Iterator[str]:
    """What a module imports, anywhere in it: at its top, inside functions, for type checking only."""
    for node in ast.walk(parsed):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in SOURCES else str(node.module)


def found(pattern: type[ast.AST] | tuple[type[ast.AST], ...]) -> Iterator[tuple[str, ast.AST]]:
    """Nodes of a kind in the whole package, each with its place."""
    for module, path in SOURCES.items():
        for node in ast.walk(tree(module)):
            if isinstance(node, pattern):
                line = getattr(node, "lineno", 0)
                yield f"{path.relative_to(ROOT)}:{line}", node


# ---- who imports whom


def test_the_order_has_every_module_once() -> None:
    assert sorted(MODULES) == sorted(SOURCES)


def test_a_package_stands_before_its_modules() -> None:
    """Importing a module imports its package first. (`compress` itself only offers names of the others.)"""
    for package, module in itertools.permutations(MODULES, 2):
        if module.startswith(package + ".") and package != "compress":
            assert MODULES.index(package) < MODULES.index(module), (package, module)


def test_nothing_imports_upwards() -> None:
    rank = {module: i for i, module in enumerate(MODULES)}
    upwards = [
        f"{module} imports {other}"
        for module in MODULES
        for other in imports(tree(module))
        if other in rank and rank[other] >= rank[module]
    ]
    assert upwards == []


def test_the_reading_of_imports_misses_none() -> None:
    text = """
import compress.errors
from compress import plan, recipe
from compress.models import FAMILIES
if TYPE_CHECKING:
    from compress.cli import main
def late():
    from compress.pipeline import run as go
    import os.path as p
"""
    assert sorted(imports(ast.parse(text))) == [
        "compress.cli", "compress.errors", "compress.models", "compress.pipeline", "compress.plan",
        "compress.recipe", "os.path",
    ]  # fmt: skip


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_stays_in_its_place(library: str) -> None:
    places = tuple(LIBRARIES[library])
    strays = [
        str(path.relative_to(ROOT))
        for module, path in SOURCES.items()
        if any(name.split(".")[0] == library for name in imports(tree(module)))
        and not str(path.relative_to(ROOT)).startswith(places)
    ]
    assert strays == []


def test_no_pickles() -> None:
    importers = [m for m in SOURCES if any(i.split(".")[0] in PICKLERS for i in imports(tree(m)))]
    assert importers == []
    loads = [
        f"{at} {code(node)}"
        for at, node in found(ast.Call)
        if re.match(r"(torch|np|numpy)\.load\(|(torch\.)?jit\.load\(|pd\.read_pickle\(", code(node))
        or re.search(r"allow_pickle=True|weights_only=False", code(node))
    ]
    assert loads == []


# ---- what is written nowhere


def test_errors_are_caught_by_name() -> None:
    broad = []
    for at, node in found(ast.ExceptHandler):
        assert isinstance(node, ast.ExceptHandler)
        names = code(node.type) if node.type else "everything"
        if re.search(r"\b(Exception|BaseException)\b|everything", names):
            broad.append(f"{at} {names}")
    assert broad == []


def test_only_the_command_line_prints_or_exits() -> None:
    calls = re.compile(r"(print|pprint|exit|quit|sys\.exit|os\._exit)\(")
    loud = [
        f"{at} {code(node)}" for at, node in found(ast.Call) if not at.startswith("cli.py") and calls.match(code(node))
    ]
    assert loud == []


def test_no_global_seed_and_no_draw_from_it() -> None:
    wrong = []
    for at, node in found(ast.Call):
        assert isinstance(node, ast.Call)
        text = code(node)
        if SEEDING.match(text) or GLOBAL_DRAWS.match(text):
            wrong.append(f"{at} {text}")
        if TORCH_DRAWS.match(code(node.func)) and not any(k.arg == "generator" for k in node.keywords):
            wrong.append(f"{at} {text} has no generator")
    assert wrong == []


def test_no_code_from_checkpoints() -> None:
    trusting = re.compile(r"trust_remote_code'?(: bool)?\s*[=:]\s*True")
    assert [module for module in SOURCES if trusting.search(ast.unparse(tree(module)))] == []


def test_functions_stay_small() -> None:
    large = []
    for at, node in found((ast.FunctionDef, ast.AsyncFunctionDef)):
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno  # noqa: PT018
        lines, a = node.end_lineno - node.lineno + 1, node.args
        names = [p.arg for p in (*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg) if p]
        parameters = len([name for name in names if name not in ("self", "cls")])
        line = (ROOT / at.split(":")[0]).read_text(encoding="utf-8").splitlines()[node.lineno - 1]
        if re.search(r"# noqa: PLR0913  # \w", line):  # an exception that carries its reason
            parameters = 0
        if lines > 60 or parameters > 8:
            large.append(f"{at} {node.name}: {lines} lines, {parameters} parameters")
    assert large == []


# ---- tables


@pytest.mark.parametrize(
    ("table", "kind", "name_of"),
    [(METHODS, Method, "name"), (FORMATS, Format, "name"), (FAMILIES, ModelFamily, "model_type")],
    ids=["methods", "formats", "families"],
)
def test_tables_resolve(table: dict[str, str], kind: type, name_of: str) -> None:
    for name, where in table.items():
        entry = resolve(table, name, kind="entry")
        assert isinstance(entry, kind), name
        assert getattr(entry, name_of) == name
        assert where.split(":")[0].endswith("." + name.replace("-", "_"))  # one file each, called like it


def test_runtimes_resolve() -> None:
    wanted = {name for name in vars(Runtime) if not name.startswith("_")}
    assert wanted >= {"load", "prefill", "decode", "logits"}
    for name in RUNTIMES:
        made = resolve(RUNTIMES, name, kind="runtime")()
        assert [part for part in wanted if not callable(getattr(made, part))] == []
        assert isinstance(made.device, str)


def test_every_measured_metric_is_registered() -> None:
    named = {
        node.args[0].value
        for _, node in found(ast.Call)
        if isinstance(node, ast.Call) and code(node.func) in ("row", "metrics.row")
        if node.args and isinstance(node.args[0], ast.Constant)
    }
    assert {"perplexity", "size_bytes", "block_error"} <= named
    logits_PV = torch.eye(4)[:, :3]
    compared = fidelity_rows(compare_logits(logits_PV, logits_PV, torch.tensor([0, 1, 2, 0])), "x", {}, 2)
    named |= {measured["metric"] for measured in compared} | set(POINT_METRICS)
    assert named - set(METRICS) == set()
