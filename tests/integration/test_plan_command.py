"""``kvbridge plan`` as a user runs it: figures that add up, pictures, and every mistake."""

import json
import re
import subprocess
import sys
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from kvbridge.cli import main, plan_report
from kvbridge.cli.model_files import GatedDeltaNet, Mamba2, NoCache, known_models, load_model
from kvbridge.cli.plan_words import words_of_bytes
from kvbridge.demo import EngineShape

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"
FOUR_HEADS = {
    "name": "four heads",
    "source": "made up",
    "dtype": "bfloat16",
    "layers": 6,
    "pattern": ["all"],
    "kinds": {"all": {"kind": "attention", "kv_heads": 4, "head_dim": 8}},
}

Capture = pytest.CaptureFixture[str]


def plan(capfd: Capture, *words: str) -> str:
    status = main(["plan", *words])
    said = capfd.readouterr()
    assert status == 0, said.err
    assert said.err == ""
    return said.out


def plan_json(capfd: Capture, *words: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(plan(capfd, *words, "--format", "json"))
    return report


def shapes(prefill: str, decode: str, model: str) -> list[str]:
    return ["--prefill", prefill, "--decode", decode, "--model", model]


@pytest.fixture
def four_heads(tmp_path: Path) -> str:
    path = tmp_path / "four-heads.json"
    path.write_text(json.dumps(FOUR_HEADS))
    return str(path)


# --- figures -------------------------------------------------------------------------------------


def test_figures_of_llama(capfd: Capture) -> None:
    report = plan_json(capfd, *shapes("tp=8,pp=2,page=16", "tp=4,page=64", "llama-3-70b"))
    assert report["version"] == 1
    assert (report["direction"], report["tokens"], report["layers"]) == ("read", 1000, 80)
    token_bytes = 2 * 8 * 128 * 2 * 80
    assert report["contiguous"]["nbytes"] == report["scattered"]["nbytes"] == 1000 * token_bytes
    assert [rank["rank"] for rank in report["ranks"]] == [[0, tp] for tp in range(4)]
    first = report["ranks"][0]
    assert [link["rank"] for link in first["links"]] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    (move,) = first["links"][3]["moves"]
    assert move["layers"] == list(range(40, 80))
    assert [(u["start"], u["end"], u["total"]) for u in move["units"]] == [(1, 2, 8)] * 2
    # Ranks of one head do not touch in pages that hold two: each token of K and V is a copy.
    assert (move["form"], move["piece_nbytes"]) == ("rows", 256)
    assert move["block"] == {"pieces": 5120, "merged": 5120, "nbytes": 64 * 40 * 512}
    assert report["readers"] == [{"rank": [pp, tp], "count": 1} for pp in (0, 1) for tp in range(8)]


@pytest.mark.parametrize("model", known_models())
@pytest.mark.parametrize(
    "pair", [("tp=4", "tp=2,pp=3,page=48"), ("tp=3,layout=hnd", "tp=8,kv=apart")]
)
def test_every_preset_moves_all_that_decode_holds(
    model: str, pair: tuple[str, str], capfd: Capture
) -> None:
    read = plan_json(capfd, *shapes(*pair, model))
    written = plan_json(capfd, *shapes(*pair, model), "--direction", "write")
    assert read["contiguous"] == written["contiguous"]
    held = {tuple(h["rank"]): h["shares"] for h in read["decode"]["ranks"]}
    for rank in read["ranks"]:
        covered: Counter[tuple[str, int]] = Counter()
        for move in (m for link in rank["links"] for m in link["moves"]):
            for part in move["units"]:
                for layer in move["layers"]:
                    covered[part["component"][0], layer] += part["end"] - part["start"]
        needed: Counter[tuple[str, int]] = Counter()
        for share in held[tuple(rank["rank"])]:
            for part in share["units"]:
                for layer in share["layers"]:
                    # K and V apart on one side are two components where the other has one.
                    needed[part["component"][0], layer] += part["end"] - part["start"]
        assert covered == needed


@pytest.mark.parametrize(
    ("words", "form"),
    [
        (("tp=2", "tp=2"), "pages"),
        (("tp=4,layout=hnd", "tp=2,layout=hnd"), "pages"),
        (("tp=2,layout=hnd", "tp=1,layout=hnd,page=32"), "runs"),
        (("tp=2", "tp=1"), "rows"),
        (("tp=2,layout=hnd", "tp=1,layout=nhd"), "cells"),
    ],
)
def test_forms(words: tuple[str, str], form: str, four_heads: str, capfd: Capture) -> None:
    report = plan_json(capfd, *shapes(*words, four_heads))
    moves = [m for rank in report["ranks"] for link in rank["links"] for m in link["moves"]]
    assert {move["form"] for move in moves} == {form}


def test_neighbouring_blocks_merge_and_scattered_ones_do_not(capfd: Capture) -> None:
    report = plan_json(capfd, *shapes("tp=1", "tp=1", "llama-3-8b"), "--tokens", "1600")
    assert report["scattered"] == {"pieces": 6400, "merged": 3200, "nbytes": 1600 * 131072}
    assert report["contiguous"]["merged"] == 32


@pytest.mark.parametrize("direction", ["read", "write"])
@pytest.mark.parametrize(
    ("prefill", "decode", "model"),
    [
        ("tp=2,page=16", "tp=1,page=48", "llama-3-8b"),
        ("tp=1,layout=hnd,page=4", "tp=2,layout=hnd,page=6,kv=apart", "gemma-3-27b"),
        ("tp=8,dcp=2,interleave=3,page=4", "tp=2,page=16", "deepseek-v3"),
        ("tp=8,dcp=2,interleave=8,page=4", "tp=8,dcp=2,interleave=8,page=4", "deepseek-v3"),
        ("tp=2", "tp=1,page=4", "qwen3-next"),
    ],
)
def test_the_middle_of_a_long_request_is_as_if_it_were_lowered(
    prefill: str, decode: str, model: str, direction: str,
    capfd: Capture, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    words = [*shapes(prefill, decode, model), "--direction", direction, "--rank", "0,0"]
    for tokens in ("333", "2048"):
        reports = []
        for at_once in (1, 1 << 40):
            monkeypatch.setattr(plan_report, "PIECES_AT_ONCE", at_once)
            reports.append(plan_json(capfd, *words, "--tokens", tokens))
        assert reports[0] == reports[1]


def test_the_longest_request_takes_no_more_memory_than_a_short_one(capfd: Capture) -> None:
    words = shapes("tp=2", "tp=1", "llama-3-8b")
    plan_json(capfd, *words)
    tracemalloc.start()
    report = plan_json(capfd, *words, "--tokens", "1000000")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert report["scattered"]["pieces"] == 128_000_000
    assert most < 1 << 30


def test_a_window_bounds_what_moves(capfd: Capture) -> None:
    short, long = (
        plan_json(capfd, *shapes("tp=1", "tp=1", "gemma-3-27b"), "--tokens", str(tokens))
        for tokens in (1024, 4096)
    )
    ratio = [
        b["contiguous"]["nbytes"] / a["contiguous"]["nbytes"]
        for a, b in zip(*(r["ranks"][0]["links"][0]["moves"] for r in (short, long)), strict=True)
    ]
    assert ratio == [1, 4]


def test_replicas_are_told_and_read_by_one(four_heads: str, capfd: Capture) -> None:
    report = plan_json(capfd, *shapes("tp=8", "tp=2", four_heads))
    assert [rank["notify_only"] for rank in report["ranks"]] == [
        [[0, 1], [0, 3]],
        [[0, 5], [0, 7]],
    ]
    shown = plan(capfd, *shapes("tp=8", "tp=2", four_heads))
    assert "without bytes: 0,0 tells 0,1 0,3; 0,1 tells 0,5 0,7\n" in shown


def test_one_rank(capfd: Capture) -> None:
    report = plan_json(capfd, *shapes("tp=2", "tp=4", "llama-3-8b"), "--rank", "0,3")
    assert [rank["rank"] for rank in report["ranks"]] == [[0, 3]]
    assert [link["rank"] for link in report["ranks"][0]["links"]] == [[0, 1]]


def test_presets_have_the_published_layers() -> None:
    def count(model: str, *kinds: type) -> int:
        figures = load_model(model)
        names = map(figures.kind_name, range(figures.layers))
        return sum(isinstance(figures.kinds[name], kinds) for name in names)

    assert (count("qwen3-next", GatedDeltaNet), load_model("qwen3-next").layers) == (36, 48)
    assert (count("nemotron-h-8b", Mamba2), count("nemotron-h-8b", NoCache)) == (24, 24)
    assert load_model("gemma-3-27b").kind_name(5) == "global"
    assert all(load_model(model).name == model for model in known_models())
    assert all(load_model(model).source for model in known_models())


def test_large_numbers_of_bytes_have_large_units() -> None:
    assert words_of_bytes(3 << 39) == "1.5 TiB"
    assert words_of_bytes(5 << 60) == "5120 PiB"


# --- words and pictures --------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [80, 160])
def test_the_table_fits(columns: int, capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = plan(capfd, *shapes("tp=8,dcp=2", "tp=4,page=64", "deepseek-v3"))
    assert max(map(len, shown.splitlines())) <= columns
    for words in (
        "decode from",
        "latent",
        "pages 1.125 KiB",
        "without bytes: nobody is told",
        "hears: 1",
    ):
        assert words in shown


def test_the_table_of_a_write(capfd: Capture) -> None:
    shown = plan(capfd, *shapes("tp=1", "tp=2", "llama-3-8b"), "--direction", "write")
    assert re.search(r"^prefill +to ", shown, re.MULTILINE)
    assert "each decode rank hears: 1" in shown


def svg(capfd: Capture, *words: str) -> ET.Element:
    text = plan(capfd, *words, "--format", "svg")
    assert plan(capfd, *words, "--format", "svg") == text
    root = ET.fromstring(text)
    assert (root.tag, root.get("version")) == (f"{SVG}svg", "1.1")
    return root


def test_the_picture_shows_replicas_pale(four_heads: str, capfd: Capture) -> None:
    root = svg(capfd, *shapes("tp=8", "tp=2", four_heads))
    said = Counter(element.text for element in root.iter(f"{SVG}text"))
    assert said["notify only"] == 4
    assert said["tells tp 1, tp 3: no bytes"] == 1
    ribbons = [path for path in root.iter(f"{SVG}path") if path.find(f"{SVG}title") is not None]
    assert len(ribbons) == 4
    assert len({ribbon.get("fill") for ribbon in ribbons}) == 4


@pytest.mark.parametrize("direction", ["read", "write"])
def test_nothing_leaves_the_picture(direction: str, capfd: Capture) -> None:
    root = svg(capfd, *shapes("tp=2,pp=2", "tp=3", "qwen3-next"), "--direction", direction)
    width, height = (float(root.get(name, "")) for name in ("width", "height"))
    for box in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(box.get(name, "")) for name in ("x", "y", "width", "height"))
        assert min(x, y) >= 0
        assert x + w <= width
        assert y + h <= height
    assert all(float(text.get("y", "")) < height for text in root.iter(f"{SVG}text"))


def test_the_picture_of_the_docs_is_this_one(capfd: Capture) -> None:
    drawn = plan(
        capfd, *shapes("tp=8,pp=2,page=16", "tp=4,page=64", "llama-3-70b"), "--format", "svg"
    )
    kept = ROOT / "docs" / "how-to" / "plan-llama-3-70b.svg"
    assert kept.read_text() == drawn, f"run the command of {kept.with_name('look-at-a-plan.md')}"


@pytest.mark.parametrize("form", ["table", "json", "svg"])
def test_a_file_instead_of_the_screen(form: str, tmp_path: Path, capfd: Capture) -> None:
    path = tmp_path / "plan"
    words = [*shapes("tp=2", "tp=1", "llama-3-8b"), "--format", form]
    assert plan(capfd, *words, "--output", str(path)) == ""
    assert "llama-3-8b" in path.read_text()


# --- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"--model": "lama-3-8b"}, "did you mean 'llama-3-8b'? known: deepseek-v3, "),
        ({"--model": "/nowhere.json"}, "cannot read model /nowhere.json: No such file"),
        ({"--prefill": "pp=33"}, "prefill: pp=33 is more than the 32 layers of llama-3-8b"),
        ({"--prefill": "tp=0"}, "--prefill: engine shape: tp=0 is not possible"),
        ({"--decode": "colour=red"}, "unknown key 'colour' in 'colour=red'; allowed: tp, pp, page"),
        ({"--decode": "page=16,pages_per_block=3"}, "pages_per_block=3 does not divide page=16"),
        ({"--decode": "tp=8,dcp=2"}, "tp=8 must be a multiple of 16 (KV heads"),
        ({"--decode": "tp=2000"}, "tp=2000 times pp=1 is more than 1024 ranks"),
        ({"--rank": "1,0"}, "there is no rank 1,0 in decode, which has pp=1, tp=2"),
        ({"--rank": "first"}, "--rank 'first' must be PP,TP"),
        ({"--tokens": "0"}, "0 is not in the range 1<=x<=1000000"),
        ({"--output": "/nowhere/plan"}, "cannot write /nowhere/plan: No such file"),
        ({"--output": ""}, "--output is empty; name the file"),
        ({"--prefill": ""}, "'--prefill': is empty"),
        ({"--model": "/dev/zero/x.json"}, "cannot read model /dev/zero/x.json: Not a directory"),
        ({"--decode": "tp=2,interleave=4"}, "decode: interleave=4 says how dcp ranks share"),
        (
            {"--prefill": f"page={10**20}"},
            (
                f"--prefill: engine shape: page={10**20} is not possible; "
                "allowed: a whole number from 1 to 1,000,000"
            ),
        ),
        (
            {"--prefill": "page=999983", "--tokens": "1000000"},
            (
                "64,000,000 copies do not repeat "
                "before token 1,000,000, and no more than 16,777,216 are counted"
            ),
        ),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    words: dict[str, str], message: str, capfd: Capture
) -> None:
    given = {"--prefill": "tp=2", "--decode": "tp=2", "--model": "llama-3-8b"} | words
    flat = [word for pair in given.items() for word in pair]
    assert main(["plan", *flat]) == 2
    said = capfd.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert message in said.err

    for json_words in (["--format", "json"], ["--format=json"]):
        assert main(["plan", *flat, *json_words]) == 2
        error = json.loads(capfd.readouterr().out)
        assert set(error) == {"error", "message"}
        assert message in error["message"]


@pytest.mark.parametrize("option", ["--prefill", "--decode", "--model"])
def test_what_is_given_twice_is_refused(option: str, capfd: Capture) -> None:
    assert main(["plan", *shapes("tp=1", "tp=1", "llama-3-8b"), option, "tp=1"]) == 2
    assert f"'{option}': given 2 times; give it once" in capfd.readouterr().err


def test_a_file_without_an_end_is_not_read(tmp_path: Path, capfd: Capture) -> None:
    path = tmp_path / "zero.json"
    path.symlink_to("/dev/zero")
    assert main(["plan", *shapes("tp=1", "tp=1", str(path))]) == 2
    assert "has more than 1,048,576 bytes" in capfd.readouterr().err


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_file_of_another_encoding_is_told_which_to_use(
    encoding: str, tmp_path: Path, capfd: Capture
) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(FOUR_HEADS), encoding=encoding)
    assert main(["plan", *shapes("tp=1", "tp=1", str(path))]) == 2
    assert "byte order mark; save it as plain UTF-8" in capfd.readouterr().err


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8", "uint8"])
def test_element_types_have_the_names_that_torch_gives_them(
    dtype: str, tmp_path: Path, capfd: Capture
) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(FOUR_HEADS | {"dtype": dtype}))
    report = plan_json(capfd, *shapes("tp=1", "tp=1", str(path)))
    assert report["contiguous"]["nbytes"] == 6 * 1000 * 2 * 4 * 8


def test_a_reader_that_goes_away_is_no_failure() -> None:
    words = [*shapes("tp=8,pp=2", "tp=8", "llama-3-70b"), "--format", "table"]
    with subprocess.Popen(
        [sys.executable, "-m", "kvbridge.cli", "plan", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(60) == 141
        assert process.stderr is not None
        assert process.stderr.read() == b""


def test_a_closed_output_is_said(capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["plan", *shapes("tp=1", "tp=1", "llama-3-8b")]) == 2
    assert "standard output is closed" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "`int` >= 1 - at `$.layers`, which is 0"),
        ({"name": "two\nlines"}, "name 'two\\nlines' holds control characters"),
        ({"name": "red \x1b[31m"}, "name 'red \\x1b[31m' holds control characters"),
        ({"name": "x" * 101}, "length <= 100 - at `$.name`"),
        ({"source": "\0"}, "source '\\x00' holds control characters"),
        ({"\x1b[31m": 1}, "unknown field `\\x1b[31m`"),
        ({"kinds": {}}, "pattern names 'all', kinds has only: nothing"),
        ({"kinds": {"all": 7}}, "kinds['all']: kind 7 is unknown; known: attention, sliding"),
        ({"kinds": {"all": {"kind": []}}}, "kinds['all']: kind [] is unknown"),
        (
            {"kinds": {"all": {"kind": "attention", "kv_heads": 0, "head_dim": 8}}},
            "kinds['all']: Expected `int` >= 1 - at `$.kv_heads`, which is 0",
        ),
        ({"layers": None}, "got `null` - at `$.layers`"),
        ({"dtype": "int3"}, "dtype 'int3' is unknown; known: bfloat16, float16, float32, float8"),
        ({"colour": "red"}, "unknown field `colour`"),
        ({"pattern": ["none"]}, "pattern names 'none', kinds has only: all"),
        ({"pattern": []}, "`$.pattern`"),
        ({"kinds": {"all": {"kind": "attention", "kv_heads": 4}}}, "`head_dim`"),
        (
            {"kinds": {"all": {"kind": "magic"}}},
            "kinds['all']: kind 'magic' is unknown; known: attention, ",
        ),
        ({"kinds": {"all": {"kind": "none"}}}, "no layer caches anything"),
    ],
)
def test_a_malformed_file_names_the_field(
    changes: dict[str, object], message: str, tmp_path: Path, capfd: Capture
) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(FOUR_HEADS | changes))
    assert main(["plan", *shapes("tp=1", "tp=1", str(path))]) == 2
    said = capfd.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_a_picture_has_room_for_64_ranks(capfd: Capture) -> None:
    words = [*shapes("tp=8,pp=9", "tp=1", "llama-3-70b"), "--format", "svg"]
    assert main(["plan", *words]) == 2
    assert "up to 64 ranks of an engine, here are 72 and 1" in capfd.readouterr().err


def test_the_demo_takes_no_keys_that_it_would_ignore() -> None:
    with pytest.raises(ValueError, match="unknown key 'dcp'"):
        EngineShape.parse("tp=2,dcp=2")
