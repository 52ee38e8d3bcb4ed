"""``kvpool generate``: what is printed, in which order, and how nonsense is refused."""

import io
import json
import os
import re
import signal
import subprocess
import sys

import mlx_lm
import numpy as np
import pytest
from huggingface_hub import errors
from mlx_models import computing_on_cpu, on_cpu, solo_tokens

from benchmarks import tiny_families
from kvpool.adapters.mlx_lm import Engine, tiny
from kvpool.adapters.mlx_lm.engine import Completion, Sample, TokenEvent
from kvpool.cli import main
from kvpool.cli.generate import Printer

PROMPTS = ["Hello", "The block table maps", "abc"]


cpu = pytest.fixture(computing_on_cpu, autouse=True)


@pytest.fixture(scope="module")
def expected():
    """What the stock model says, as text."""
    with on_cpu():
        model, tokenizer = tiny.make()
        texts = []
        for prompt in PROMPTS:
            tokens = solo_tokens(model, tokenizer.encode(prompt), 40)
            end = tokens.index(256) if 256 in tokens else len(tokens)
            texts.append(tokenizer.decode(tokens[:end]))
        return texts


def generate(*arguments):
    return main(["generate", "--model", "tiny", "--max-tokens", "40", *arguments])


def test_model_that_gives_no_number_is_an_error_of_one_line(capsys, monkeypatch):
    model, tokenizer = tiny.make()
    model.model.embed_tokens.weight[tokenizer.encode("}")[0]] = np.inf
    monkeypatch.setattr(tiny, "make", lambda: (model, tokenizer))
    assert generate("--prompt", "a", "--prompt", "a } b") == 2
    assert "prompt 2: the logits for token 0 of sample 0 are not finite" in capsys.readouterr().err


@pytest.mark.parametrize("arch", ["qwen3", "gemma3"])
def test_model_of_a_folder_answers_with_stock_tokens(capsys, arch, tmp_path):
    assert generate("--model", str(tmp_path), "--prompt", "x") == 2
    assert capsys.readouterr().err == f"kvpool generate: --model {tmp_path}: a folder without config.json\n"
    tiny_families.save(tmp_path, arch)
    assert generate("--model", str(tmp_path), "--prompt", PROMPTS[0], "--json") == 0
    (sample,) = json.loads(capsys.readouterr().out)["answers"][0]["samples"]
    with on_cpu():
        model, tokenizer = mlx_lm.load(str(tmp_path))[:2]
        assert sample["tokens"] == solo_tokens(model, tokenizer.encode(PROMPTS[0]), 40)


def test_one_prompt_prints_its_text_alone_and_several_are_printed_in_order(capsys, monkeypatch, expected):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPTS[1] + "\n"))
    assert generate("--prompt", "-") == 0
    assert capsys.readouterr() == (expected[1] + "\n", "kvpool generate: loading tiny ...\n")
    assert generate(*[word for prompt in PROMPTS for word in ("--prompt", prompt)], "--chunk", "3") == 0
    blocks = [f"=== prompt {i + 1}\n{text}\n" for i, text in enumerate(expected)]
    assert capsys.readouterr().out == "".join(blocks)


def test_prompts_in_files_come_after_the_others(capsys, tmp_path, expected):
    (tmp_path / "p.txt").write_text(PROMPTS[1] + "\n")
    assert generate("--prompt-file", str(tmp_path / "p.txt")) == 0
    assert capsys.readouterr().out == expected[1] + "\n"
    assert generate("--prompt-file", str(tmp_path / "p.txt"), "--prompt", PROMPTS[0]) == 0
    assert capsys.readouterr().out == f"=== prompt 1\n{expected[0]}\n=== prompt 2\n{expected[1]}\n"


def test_system_prompt_stands_in_front_in_the_chat_template(capsys, monkeypatch):
    told = []
    of_tokenizer = type(tiny.byte_tokenizer()).apply_chat_template
    monkeypatch.setattr(
        type(tiny.byte_tokenizer()),
        "apply_chat_template",
        lambda self, turns, **options: told.append(turns) or of_tokenizer(self, turns, **options),
    )
    assert generate("--system", "be short", "--prompt", "a") == 0
    assert told[0] == [{"role": "system", "content": "be short"}, {"role": "user", "content": "a"}]
    monkeypatch.setattr(tiny, "TEMPLATE", "{{ raise_exception('no system prompt') }}")
    assert generate("--system", "be short", "--prompt", "a") == 2
    assert "the chat template of this model refuses the prompt: no system prompt" in capsys.readouterr().err


def test_json_has_texts_tokens_and_statistics(capsys, expected):
    assert generate("--prompt", PROMPTS[1], "--n", "3", "--temperature", "0.9", "--seed", "7", "--json") == 0
    first = json.loads(capsys.readouterr().out)
    (answer,) = first["answers"]
    assert answer["prompt"] == PROMPTS[1]
    assert len({one["text"] for one in answer["samples"]}) == 3
    assert all(len(one["tokens"]) == len(one["logprobs"]) <= 40 for one in answer["samples"])
    assert first["stats"]["blocks_left"] == 0 and first["stats"]["tokens"] > 3
    assert generate("--prompt", PROMPTS[1], "--temperature", "0.9", "--seed", "9", "--json", "--num-blocks", "6") == 0
    (alone,) = json.loads(capsys.readouterr().out)["answers"]
    assert alone["samples"][0]["text"] == answer["samples"][2]["text"]


def test_a_stop_string_ends_the_text_before_it(capsys, expected):
    stop = expected[1][7:10]
    assert generate("--prompt", PROMPTS[1], "--stop", stop, "--stop", "never there") == 0
    assert capsys.readouterr().out == expected[1][: expected[1].index(stop)] + "\n"


def test_a_beam_prints_its_best(capsys):
    assert generate("--prompt", PROMPTS[0], "--beam", "3", "--n", "2") == 0
    out = capsys.readouterr().out
    assert out.startswith("=== sample 1\n") and "\n=== sample 2\n" in out


@pytest.mark.parametrize(
    "how", [["--memory", "1MiB", "--chat", "--no-prefix-cache"], ["--speculate", "3", "--draft-model", "tiny"]]
)
def test_stats_go_to_stderr_and_say_how_many_drafts_were_accepted(capsys, how):
    assert generate("--prompt", PROMPTS[0], "--stats", "--max-tokens", "12", *how) == 0
    captured = capsys.readouterr()
    assert "tokens in" in captured.err and "blocks" in captured.err and "tokens in" not in captured.out
    lines = [line for line in captured.err.splitlines() if line.startswith("drafts ")]
    assert len(lines) == ("--speculate" in how)
    for line in lines:
        drafted, accepted = map(int, re.findall(r"\d+", line))
        assert re.search(r" \d+ tokens drafted, \d+ accepted$", line)
        assert drafted >= accepted > 0  # the model drafts for itself


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", ""], "--prompt: it is empty"),
        (["--prompt", "caf\udce9"], "--prompt: it is not valid UTF-8"),
        (["--prompt-file", "/nowhere/p.txt"], "--prompt-file /nowhere/p.txt: No such file or directory"),
        (["--prompt", "-", "--prompt", "-"], "--prompt -: standard input can be read only once"),
        (["--temperature", "nan"], "--temperature nan: out of range, at least 0"),
        (["--temperature", "warm"], "--temperature warm: not a number"),
        (["--top-p", "0"], "--top-p 0: out of range, above 0 and at most 1"),
        (["--max-tokens", "-5"], "--max-tokens -5: out of range"),
        (["--max-tokens", "9000"], "prompt 1: 1 prompt tokens and 9000 more, the model takes 8192"),
        (["--max-tokens", "900", "--memory", "100000"], "1 prompt tokens and 900 more, memory holds "),
        (["--n", "0"], "--n 0: out of range"),
        (["--n", "3", "--beam", "2"], "--n 3: a beam of 2 has only 2 hypotheses"),
        (["--beam", "2", "--stop", "x"], "--stop and --beam exclude each other"),
        (["--beam", "2", "--temperature", "0.5"], "--temperature and --beam exclude each other"),
        (["--beam", "2", "--top-k", "3"], "--top-k and --beam exclude each other"),
        (["--stop", ""], "--stop: the text is empty"),
        (["--seed", "-1"], "--seed -1: out of range"),
        (["--num-blocks", "3"], "prompt 1: 40 tokens need 3 blocks"),
        (["--draft-model", "tiny"], "--draft-model: needs --speculate"),
        (["--speculate", "-1"], "--speculate -1: out of range"),
        (["--speculate", "4", "--draft-model", "/no/such"], "--draft-model /no/such: no such folder"),
        (["--speculate", "4", "--eviction", "h2o", "--max-kv", "9"], "--speculate and --eviction h2o exclude each"),
        (["--num-blocks", "9", "--memory", "1MiB"], "--memory and --num-blocks exclude each other"),
        (["--memory", "lots"], "generate: --memory lots: 'lots' is not a size"),
        (["--model", "/no/such/folder"], "--model /no/such/folder: no such folder"),
        (["--model", "nothing"], "--model nothing: no such folder, and no repository of the form owner/name"),
        (["--model", "x" * 300], f"--model {'x' * 80}: File name too long"),
    ],
)
def test_nonsense_is_refused_in_one_line(capsys, arguments, message):
    prompt = [] if "--prompt" in arguments else ["--prompt", "x"]
    assert generate(*prompt, *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert message in captured.err, captured.err


@pytest.mark.parametrize("how", [[], ["--draft-model", "tiny"], ["--draft-model", "tiny", "--memory", "1MiB"]])
@pytest.mark.parametrize("sampled", [[], ["--temperature", "0.8", "--seed", "3"]])
def test_speculation_prints_the_same_in_fewer_steps(capsys, how, sampled):
    results = []
    for arguments in ([], ["--speculate", "3", *how]):
        assert generate("--prompt", "abcabcabcabc", "--json", *arguments, *sampled) == 0
        results.append(json.loads(capsys.readouterr().out))
    plain, drafted = results
    assert drafted["answers"] == plain["answers"]
    assert drafted["stats"]["blocks_left"] == 0
    counts = [one["stats"][name] for one in results for name in ("drafted_tokens", "accepted_tokens")]
    assert counts[:2] == [0, 0] and counts[2] >= counts[3] >= 0
    saved = plain["stats"]["steps"] - drafted["stats"]["steps"]
    assert saved <= counts[3]
    if how and not sampled:
        assert counts[3] > 0
        assert drafted["stats"]["steps"] < plain["stats"]["steps"] / 2


def test_prompt_that_cannot_end_in_memory_is_refused_where_the_model_takes_any_length(capsys, tmp_path):
    tiny.write(tmp_path, tiny.CONFIG, *tiny.make())
    config = json.loads((tmp_path / "config.json").read_text())
    del config["max_position_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert generate("--model", str(tmp_path), "--prompt", "x", "--max-tokens", "2000000000") == 2
    assert "1 prompt tokens and 2000000000 more, memory holds " in capsys.readouterr().err


def test_several_samples_without_temperature_are_noted(capsys):
    assert generate("--prompt", "x", "--n", "2") == 0
    assert "without --temperature all samples" in capsys.readouterr().err
    assert generate("--prompt", "x", "--n", "2", "--temperature", "1", "--seed", "1") == 0
    assert capsys.readouterr().err == ""


@pytest.fixture
def interrupted(monkeypatch):
    """Ctrl-C comes after 20 steps."""
    steps, step = [], Engine.step

    def counted(engine):
        steps.append(1)
        found = step(engine)
        if len(steps) == 20:
            signal.raise_signal(signal.SIGINT)
        return found

    monkeypatch.setattr(Engine, "step", counted)
    return steps


def test_interrupt_prints_what_every_sample_has(capsys, interrupted):
    how = ["--prompt", PROMPTS[0], "--prompt", PROMPTS[2], "--n", "2", "--temperature", "1", "--seed", "1"]
    assert generate(*how, "--json") == 130
    answers = json.loads(capsys.readouterr().out)["answers"]
    samples = [sample for answer in answers for sample in answer["samples"]]
    assert [sample["finish_reason"] for sample in samples] == ["cancelled"] * 4
    assert all(len(sample["tokens"]) >= 18 for sample in samples) and len(interrupted) == 20
    interrupted.clear()
    assert generate(*how) == 130
    captured = capsys.readouterr()
    heads = [f"=== prompt {prompt}, sample {sample}\n" for prompt in (1, 2) for sample in (1, 2)]
    texts = zip(heads, samples, strict=True)
    assert captured.out == "".join(head + sample["text"] + "\n" for head, sample in texts)
    assert captured.err.endswith("kvpool generate: interrupted\n")


def test_interrupt_prints_the_best_of_a_beam_so_far(capsys, interrupted):
    assert generate("--prompt", PROMPTS[0], "--beam", "3") == 130
    assert len(capsys.readouterr().out) > 10


def test_interrupt_prints_the_text_that_waited_for_a_sample_without_text(capsys, interrupted):
    how = ["--prompt", "a" * 3000, "--prompt", PROMPTS[0], "--chunk", "16", "--max-tokens", "6"]
    assert generate(*how[2:4], *how[6:]) == 0
    text = capsys.readouterr().out
    interrupted.clear()
    assert generate(*how) == 130  # the second prompt has ended, the first one is still read
    assert len(interrupted) == 20 and capsys.readouterr().out == f"=== prompt 2\n{text}"


def test_every_sample_with_text_has_its_head(capsys):
    printer = Printer(prompts=2, samples=1, quiet=False)
    printer.on_token(TokenEvent(0, 0, 200, -1.0, "", None))  # the first byte of a character is not text
    printer.on_token(TokenEvent(1, 0, 65, -1.0, "A", "length"))
    assert capsys.readouterr().out == ""
    printer.end(Completion(0, (Sample(np.array([200]), None, "", "cancelled", None),)))
    assert capsys.readouterr().out == "=== prompt 2\nA\n"


def test_second_interrupt_ends_at_once(monkeypatch):
    def never(engine):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the second one was ignored")

    monkeypatch.setattr(Engine, "step", never)
    before = signal.getsignal(signal.SIGINT)
    assert generate("--prompt", "x") == 130
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (errors.RepositoryNotFoundError, "the Hugging Face Hub has no such model, or shows it only with an HF_TOKEN"),
        (errors.GatedRepoError, "gives this model only to accounts with access: ask for it there, then set HF_TOKEN"),
        (errors.LocalEntryNotFoundError, "it is not in the local cache, and the Hugging Face Hub cannot be reached"),
        (OSError, "OSError: a word a word .* a word \\.\\.\\."),
    ],
)
def test_model_that_the_hub_does_not_give_is_refused_in_a_whole_sentence(capsys, monkeypatch, kind, said):
    error = kind.__new__(kind)
    error.args = ("a word " * 100,)

    def load(name):
        raise error

    monkeypatch.setattr("mlx_lm.load", load)
    assert main(["generate", "--model", "owner/name", "--prompt", "a"]) == 2
    assert re.fullmatch(rf"kvpool generate: --model owner/name: .*{said}\n", capsys.readouterr().err)


COMMAND = [sys.executable, "-m", "kvpool", "generate", "--model", "tiny", "--prompt", "Hello", "--stats"]


def test_text_comes_while_it_is_made_and_stays_after_an_interrupt():
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
    with subprocess.Popen([*COMMAND, "--max-tokens", "8000"], **pipes) as process:
        try:
            text = b""
            while len(text) < 50:
                text += (piece := os.read(process.stdout.fileno(), 4096))
                assert piece, process.stderr.read().decode()
            assert process.poll() is None, "nothing came before the end"
            process.send_signal(signal.SIGINT)
            rest, said = process.communicate(timeout=120)
        finally:
            process.kill()
    text = (text + rest).decode()
    assert process.returncode == 130 and text.endswith("\n") and len(text) < 8000
    assert "tokens in" in said.decode() and said.decode().endswith("kvpool generate: interrupted\n")
