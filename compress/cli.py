"""The command line: parse, call one function, print. The only place that prints or exits.

Exit codes: 0 done; 2 a mistake that the message says how to mend; 1 a fault of ours, with a traceback;
130 interrupted, and the same command goes on from there.
"""

import argparse
import dataclasses
import errno
import json
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_MOST_THREADS = 1024
_MACHINE_SAYS_NO = {
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ENAMETOOLONG,
    errno.EEXIST, errno.ELOOP,
}  # fmt: skip
CHANGES: dict[str, tuple[str, type]] = {  # options that stand in place of a recipe's values
    "--suite": ("evaluate.suite", str),
    "--format": ("format", str),
    "--dataset": ("calibration.dataset", str),
    "--samples": ("calibration.samples", int),
    "--seq-len": ("calibration.seq_len", int),
    "--seed": ("calibration.seed", int),
}
EPILOG = """\
examples:
  compress run gptq-4bit --model smollm2-135m     make, verify and measure an artifact
  compress plan gptq-4bit --model llama3-8b       see what would be done, in seconds
  compress eval artifacts/smollm2-135m--gptq-4bit --suite core
  compress compare artifacts/smollm2-135m--gptq-4bit artifacts/smollm2-135m--rtn-4bit
  compress report artifacts/smollm2-135m--gptq-4bit
  compress recipes                                what can be made
  compress models                                 names of models

A recipe is a name or a YAML file; a model is a name, a hub id (org/name, org/name@revision) or a folder.
An interrupted run goes on from where it was when the same command is given again.
"""


def parser() -> argparse.ArgumentParser:
    """The arguments of every command."""
    from compress.formats import FORMATS

    top = argparse.ArgumentParser(
        prog="compress",
        description="Make language models smaller and faster, and know what it cost.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = _add(commands, "run", "compress a model; verify, measure and report the artifact")
    _recipe_and_model(run)
    run.add_argument("--out", type=Path, help="folder of the artifact (artifacts/<model>--<recipe>)")
    run.add_argument("--no-eval", action="store_true", help="stop after the verified artifact: no measurements")
    _machine(run)
    plan = _add(commands, "plan", "show what a run would do; reads no weights")
    _recipe_and_model(plan)
    judge = _add(commands, "eval", "measure an artifact, or any checkpoint that transformers loads")
    judge.add_argument(
        "target", metavar="PATH_OR_ID", help="an artifact, a model's folder, name or hub id, a GGUF file"
    )
    judge.add_argument("--suite", help="a name or a YAML file (embedded)")
    judge.add_argument("--against", metavar="BASE", help="the model to compare with (an artifact's own base)")
    judge.add_argument("--out", type=Path, help="folder of the report (the artifact's, else evaluations/<name>)")
    _machine(judge)
    sides = _add(commands, "compare", "put artifacts and other checkpoints side by side, on the same terms")
    sides.add_argument(
        "targets", nargs="+", metavar="PATH_OR_ID", help="artifacts, models' folders, names or ids, GGUF files"
    )
    sides.add_argument("--suite", help="a name or a YAML file (each artifact's own)")
    sides.add_argument("--against", metavar="BASE", help="the model to compare with (the first artifact's base)")
    sides.add_argument("--out", type=Path, help="folder of the comparison (comparisons/<names>)")
    sides.add_argument("--force", action="store_true", help="also where they were not measured alike; it is said")
    sides.add_argument("--threads", type=int, metavar="N", help="CPU threads (all cores)")
    turn = _add(commands, "convert", "write an artifact's codes in another format")
    turn.add_argument("artifact", type=Path, help="an artifact, or any quantized checkpoint that is read here")
    turn.add_argument("--to", required=True, metavar="FORMAT", help="the format to write: " + ", ".join(FORMATS))
    turn.add_argument("--out", type=Path, help="the new folder (beside the artifact, with the format's name)")
    show = _add(commands, "report", "print an artifact's report")
    show.add_argument("artifact", type=Path, help="folder of an artifact")
    _add(commands, "recipes", "list the shipped recipes, and what each costs")
    _add(commands, "models", "list the models known by name, and their sizes")
    return top


def _add(commands: Any, name: str, summary: str) -> argparse.ArgumentParser:
    added: argparse.ArgumentParser = commands.add_parser(name, help=summary, description=summary.capitalize() + ".")
    added.add_argument("--json", action="store_true", help="print one JSON document on standard output")
    return added


def _recipe_and_model(command: argparse.ArgumentParser) -> None:
    command.add_argument("recipe", metavar="RECIPE", help="name of a shipped recipe, or a YAML file")
    command.add_argument("--model", required=True, help="name, hub id or folder")
    for flag, (key, kind) in CHANGES.items():
        command.add_argument(
            flag, type=kind, metavar=key.rsplit(".", 1)[-1].upper(), help=f"in place of the recipe's {key}"
        )


def _machine(command: argparse.ArgumentParser) -> None:
    command.add_argument("--threads", type=int, metavar="N", help="CPU threads (all cores)")
    command.add_argument("--device", default="auto", help="auto or cpu")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code."""
    options = parser().parse_args(arguments)
    from compress.errors import CompressError

    command: Callable[[argparse.Namespace], int] = globals()[f"_{options.command}"]
    try:
        return command(options)
    except CompressError as error:
        _say_error(error, options.json)
        return 2
    except BrokenPipeError:  # whoever read our output has left; workers are asked through files, not pipes
        sys.stderr.close()
        return 0
    except OSError as error:
        if error.errno not in _MACHINE_SAYS_NO:
            raise
        hint = "mend that and run the same command again; what is finished is kept"
        where = str(error.filename2 or error.filename or "")  # of a copy, where it was to go
        _say_error(CompressError(error.strerror or str(error), where=where, hint=hint), options.json)
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted; what is finished is kept: the same command goes on from there\n")
        return 130


def _say_error(error: Any, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"error": {"what": error.what, "where": error.where, "do": error.hint}}))
    sys.stderr.write("error: " + "\n".join(error.lines()) + "\n")


def _run(options: argparse.Namespace) -> int:
    from compress.pipeline import run

    _quiet(options.threads)
    with _Bars(silent=options.json) as bars:
        outcome = run(
            options.recipe, options.model, options.out, changes=_changes(options), device=options.device,
            evaluate=not options.no_eval, progress=bars.update,
        )  # fmt: skip
    return _say_outcome(outcome, "artifact", options.json)


def _eval(options: argparse.Namespace) -> int:
    from compress.judge import judge

    _quiet(options.threads)
    with _Bars(silent=options.json) as bars:
        outcome = judge(
            options.target, suite=options.suite, against=options.against, out=options.out, device=options.device,
            progress=bars.update,
        )  # fmt: skip
    return _say_outcome(outcome, "evaluation", options.json)


def _compare(options: argparse.Namespace) -> int:
    from compress.comparison import compare, document
    from compress.evaluation.beside import text

    _quiet(options.threads)
    with _Bars(silent=options.json) as bars:
        found = compare(
            options.targets, suite=options.suite, against=options.against, out=options.out, force=options.force,
            progress=bars.update,
        )  # fmt: skip
    if options.json:
        print(json.dumps({"comparison": str(found.folder), **document(found)}))
        return 0
    print(text(found.table))
    for line in found.table.differences:
        print("\n".join(textwrap.wrap(f"not alike: {line}", 80, subsequent_indent="      ")))
    print(f"\ncomparison {found.folder / 'comparison.html'}")
    return 0


def _convert(options: argparse.Namespace) -> int:
    from compress.convert import convert

    _quiet(None)
    with _Bars(silent=options.json) as bars:
        outcome = convert(options.artifact, options.to, options.out, bars.update)
    return _say_outcome(outcome, "artifact", options.json)


def _say_outcome(outcome: Any, kind: str, as_json: bool) -> int:
    if as_json:
        print(json.dumps({kind: str(outcome.folder), "report": outcome.report}))
        return 0
    _print_report(outcome.report)
    print(f"\n{kind:10} {outcome.folder}\n{'report':10} {outcome.folder / 'report.html'}")
    return 0


def _changes(options: argparse.Namespace) -> dict[str, Any]:
    given = {key: getattr(options, flag[2:].replace("-", "_")) for flag, (key, _) in CHANGES.items()}
    return {key: value for key, value in given.items() if value is not None}


def _plan(options: argparse.Namespace) -> int:
    from compress.evaluation.cost import cost
    from compress.job import prepare, refusal
    from compress.plan_text import plan_text

    _quiet(None)
    job = prepare(options.recipe, options.model, changes=_changes(options))
    takes = cost(job.suite, job.params)
    document = {**job.plan.document(), "cost": takes.document}
    print(json.dumps(document) if options.json else plan_text(job.plan, takes.text))
    refused = refusal(job)
    if refused:
        _say_error(refused, as_json=False)  # the document above says it already
    return 2 if refused else 0


def _report(options: argparse.Namespace) -> int:
    from compress.evaluation import report

    document = report.read(options.artifact)
    if options.json:
        print(json.dumps(document))
    else:
        _print_report(document)
    return 0


def _print_report(document: dict[str, Any]) -> None:
    from compress.evaluation.table import summary_table

    verified = document["verified"] or {}
    about = document["artifact"]
    scheme = about.get("scheme") or []
    said = f"{about['name']}: {', '.join([scheme] if isinstance(scheme, str) else scheme)}"
    print("\n".join(textwrap.wrap(said, 80, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)))
    print(summary_table(document))
    if verified:
        print(f"verified: {verified['blocks']} blocks reopened, largest error {verified['max_error']:.1e}")
    if "logit_error" in verified and verified.get("decoded"):
        print("verified: transformers' own modules give the same logits with the weights that we decode")
    elif "logit_error" in verified:
        print("verified: plain transformers loads it and gives the same logits")
    for note in about.get("notes") or []:
        print("\n".join(textwrap.wrap(f"note: {note}", 80, subsequent_indent="      ")))


def _recipes(options: argparse.Namespace) -> int:
    from compress.recipe import load, price, recipe_names

    recipes = [load(name) for name in recipe_names()]
    if options.json:
        print(json.dumps([{"name": r.name, **r.recipe.document(), "cost": price(r.recipe)} for r in recipes]))
        return 0
    width = max(len(r.name) for r in recipes) + 1
    for r in recipes:
        cost = price(r.recipe)
        tokens = f"{cost['calibration_tokens']:,} calibration tokens" if cost["calibration_tokens"] else "no data"
        facts = (
            f"{', '.join(s.method for s in r.recipe.steps)}; {cost['bits_per_weight']:.3g} bits a weight "
            f"({cost['bits_per_weight'] / 16:.2f} of bfloat16); {tokens}; {r.recipe.format}; suite {cost['suite']}"
        )
        lines = [
            line
            for text in (r.recipe.summary, facts)
            for line in textwrap.wrap(text, 79 - width, break_on_hyphens=False)
        ]
        print("\n".join(f"{r.name if i == 0 else '':{width}} {line}" for i, line in enumerate(lines)))
    return 0


def _models(options: argparse.Namespace) -> int:
    from compress.models.source import list_aliases

    aliases = list_aliases()
    if options.json:
        print(json.dumps([{**dataclasses.asdict(alias), "bfloat16_bytes": 2 * alias.params} for alias in aliases]))
        return 0
    print(f"{'name':14} {'params':>7} {'bfloat16':>9}  {'license':10} where")
    for a in aliases:
        place = "hub" if a.package is None else "pip package" if a.package.only else "pip package or hub"
        mark = ", cached" if a.cached else ", gated" if a.gated else ""
        size = f"{2 * a.params / 1e9:.3g} GB"
        print(f"{a.name:14} {a.params / 1e9:6.2f}B {size:>9}  {a.license[:10]:10} {place}{mark}")
    return 0


def _quiet(threads: int | None) -> None:
    """Sets threads and keeps libraries' chatter out of the output."""
    import torch

    from compress.errors import CompressError
    from compress.models.load import hush

    if threads is not None:
        if not 1 <= threads <= _MOST_THREADS:
            what = f"--threads must be from 1 to {_MOST_THREADS}, not {threads}"
            raise CompressError(what, where="--threads", hint="leave it out to use every core")
        torch.set_num_threads(threads)
    hush()


class _Bars:
    """Progress bars with time left, on standard error; plain lines where that is no terminal."""

    def __init__(self, silent: bool) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._bars = Progress(
            TextColumn("{task.description:10}"), BarColumn(bar_width=30), MofNCompleteColumn(),
            TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
            console=Console(stderr=True), disable=silent or not sys.stderr.isatty(),
        )  # fmt: skip
        self._tasks: dict[str, Any] = {}
        self._lines = not silent and not sys.stderr.isatty()
        self._said: set[tuple[str, int]] = set()

    def __enter__(self) -> "_Bars":
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def update(self, stage: str, done: int, total: int) -> None:
        """Shows that `done` of `total` parts of a stage are done."""
        tenth = 10 * done // max(1, total)
        if self._lines and (stage, tenth) not in self._said:
            self._said.add((stage, tenth))
            sys.stderr.write(f"{stage} {done}/{total}\n")
            sys.stderr.flush()
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=total)
        for other, task in self._tasks.items():
            if other != stage:
                self._bars.update(task, completed=self._bars.tasks[task].total)
        self._bars.update(self._tasks[stage], completed=done, total=total)
