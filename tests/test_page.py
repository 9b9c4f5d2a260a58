"""The page of study/page.py, looked at with a real browser. Without one these tests are skipped, and say so."""
import base64
import json
import os
import re
import shutil
import subprocess
import tempfile
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import data
import decode
import lora
import page
import tabom
from model import load_model, load_tokenizer, read_config
from tests.tiny import HERE, adapted, edit_json, read_lines, run_main, trajectory, write_lines

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(not CHROMIUM, reason="no chromium, chromium-browser or google-chrome on the PATH")

# -----------------------------------------------------------------------------
# a browser, driven through the two pipes of its DevTools protocol: JSON messages, a zero byte behind each

class Browser:
    def __init__(self, folder):
        to_browser, self.to = os.pipe()
        self.back, from_browser = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
                 "--disable-background-networking", "--disable-component-update", f"--user-data-dir={folder}",
                 "--remote-debugging-pipe"]               # which reads from 3 and writes to 4
        command = ["bash", "-c", f'exec "$@" 3<&{to_browser} 4>&{from_browser}', "bash", CHROMIUM, *flags]
        self.process = subprocess.Popen(command, pass_fds=(to_browser, from_browser), stderr=subprocess.DEVNULL,
                                        env=os.environ | {"TMPDIR": folder})
        os.close(to_browser)
        os.close(from_browser)
        self.sent, self.buffer, self.events, self.session = 0, b"", [], {}
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self.session = {"sessionId": self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Network", "Log"):
            self(f"{domain}.enable")

    def receive(self) -> dict:
        while b"\0" not in self.buffer:
            got = os.read(self.back, 1 << 20)
            assert got, "the browser has ended"
            self.buffer += got
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def __call__(self, method, **params) -> dict:
        self.sent += 1
        os.write(self.to, json.dumps({"id": self.sent, "method": method, "params": params, **self.session}).encode()
                 + b"\0")
        while True:
            message = self.receive()
            if message.get("id") == self.sent:
                assert "error" not in message, message
                return message["result"]
            self.events.append(message)

    def run(self, script):
        """The value of a JavaScript expression."""
        found = self("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def open(self, path, width=1366, height=768, dark=False):
        """Opens a file and waits until it is complete, without an error or a request for anything else."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500)
        self("Emulation.setEmulatedMedia", features=scheme)
        self.events.clear()
        self("Page.navigate", url=path.as_uri())
        while "Page.loadEventFired" not in [event["method"] for event in self.events]:
            self.events.append(self.receive())
        self.check(path)

    def check(self, path):
        for event in self.events:
            if event["method"] == "Network.requestWillBeSent":
                assert event["params"]["request"]["url"] == path.as_uri()
            assert event["method"] not in ("Page.javascriptDialogOpening", "Runtime.exceptionThrown", "Log.entryAdded",
                                           "Page.windowOpen", "Target.targetCreated"), event


@pytest.fixture(scope="module")
def browser():
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        found = Browser(folder)
        yield found
        found.process.terminate()
        found.process.wait()

# -----------------------------------------------------------------------------
# pages: of the toy, with two random adapters

TOY, COMMITTED = HERE / "study" / "base", HERE / "study" / "page.html"


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """(folder with heldout.jsonl and two adapters, the page of them)."""
    folder = tmp_path_factory.mktemp("page")
    prompts = [{"prompt": record["prompt"]} for record in data_of(COMMITTED)["records"][:2]]
    write_lines(folder / "p.jsonl", prompts)
    run_main(decode, f"--model {TOY} --prompts {folder}/p.jsonl --tokens-per-step 2 --out {folder}/heldout.jsonl")
    adapters = []
    for seed, name in enumerate("ab"):
        lora.save(adapted(str(TOY), seed=seed), folder / name)
        adapters.append(f"{name}={folder / name}")
    flags = ["--model", str(TOY), "--adapter", *adapters, "--data", f"{folder}/heldout.jsonl", "--window", "4", "--all"]
    return folder, page_of(folder, *flags)


def page_of(tmp_path, *flags):
    out = tmp_path / "page.html"
    run_main(page, [*flags, "--out", str(out)])
    return out


def data_of(path) -> dict:
    return json.loads(re.search(r'id="data">(.*?)</script>', path.read_text(), re.S)[1])

# -----------------------------------------------------------------------------

@needs_browser
def test_page_shows_what_tabom_loss_gives_at_20_random_cuts(toy, browser):
    """A forward of its own for every cut, a plain view, and the page's cells and bars as a person reads them."""
    folder, path = toy
    browser.open(path)
    config = read_config(str(TOY))
    trajs = data.load_trajectories(f"{folder}/heldout.jsonl", config, load_tokenizer(config), everything=True)
    model, rng, settings = load_model(config), np.random.default_rng(0), tabom.parse_args(["--data", "-"])
    cuts = []
    for n in rng.integers(len(trajs), size=20):
        cuts.append((int(n), int(rng.integers(trajs[n].step.max() + 1))))
    for m, adapter in enumerate([None, folder / "a", folder / "b"]):
        if adapter:
            lora.load(model, adapter)
        for n, k in cuts[m::3]:
            traj = trajs[n]
            view = data.View(traj, traj.decoded_before(k), traj.order[traj.step[traj.order] >= k][:4])
            batch = tabom.collate([view], config.mask_id, "cpu")
            with torch.no_grad():
                logp = F.log_softmax(model(batch.ids, batch.attend, batch.pos).float(), dim=-1)
            loss, parts = tabom.tabom_loss(logp, batch, settings)
            want = [x.item() for x in (loss, parts["ce"], parts["rank_loss"], parts["in_order"])]
            # the slider and the menu as a hand moves them
            browser.run(f"""for (const [id, value] of [["record", {n}], ["cut", {k}]]) {{
                document.getElementById(id).value = value
                document.getElementById(id).dispatchEvent(new Event("input", {{bubbles: true}})) }}""")
            row = f'document.querySelectorAll("#models > div")[{m}].querySelectorAll("tr:nth-child(2) td")'
            cells = browser.run(f"[...{row}].map(cell => cell.textContent)")
            assert cells == [f"{x:.3f}" for x in want[:3]] + [f"{100 * want[3]:.0f} %"]
            assert browser.run(f"lossAt(record.decodings[0].models[{m}], cut)") == pytest.approx(want, abs=2e-5)
            # what is drawn: the targets' numbers, their entropies, and a mark for each pair
            outlined = browser.run("[...document.querySelectorAll('#text .next')].map(e => [+e.dataset.n, e.title])")
            places = [f"position {i + 1}, step {traj.step[i] + 1}" for i in view.targets]
            assert [place for _, place in sorted(outlined)] == places
            titles = browser.run(f"""[...document.querySelectorAll("#models > div")[{m}].querySelectorAll("title")]
                .map(e => e.textContent)""")
            h = [float(re.search(r"entropy (\S+),", title)[1]) for title in titles[:len(view.targets)]]
            assert h == pytest.approx(page.entropy(logp)[0].tolist(), abs=6e-4)
            pairs = titles[len(view.targets):]
            hinges = [float(title.rpartition(" ")[2]) for title in pairs]
            assert np.mean(hinges or [0]) == pytest.approx(want[2], abs=6e-4)
            assert sum("out of order" not in t for t in pairs) == round(want[3] * max(1, len(pairs)))
            visible = browser.run("""[...document.querySelectorAll("#text .tok")].map(e => e.className == "tok")""")
            assert visible == view.visible.tolist()


def test_an_adapter_decodes_as_decode_does(toy, tmp_path):
    """The second decoding is that of decode.py --adapter with the records' settings, and measured in its own states."""
    folder, path = toy
    shown = data_of(path)
    run_main(decode, f"--model {TOY} --adapter {folder}/b --prompts {folder}/p.jsonl --tokens-per-step 2 "
                 f"--out {tmp_path}/b.jsonl")
    by_prompt = {row["prompt"]: row for row in read_lines(tmp_path / "b.jsonl")}
    for record in shown["records"]:
        want, got = by_prompt[record["prompt"]], record["decodings"][2]
        assert (got["by"], got["row"], got["correct"]) == ("b", want["decoding_order"], want["correct"])
        grid = np.frombuffer(base64.b64decode(got["models"][0]["map"]), "u1").reshape(-1, len(got["row"]))
        known = np.array(got["row"])[None] < np.arange(len(grid))[:, None]
        assert np.array_equal(grid == 255, known & (np.array(got["row"]) >= 0)[None])
        for i, (k, h) in enumerate(zip(want["decoding_order"], want["entropy"], strict=True)):
            if k >= 0:
                assert abs(grid[k, i] / 254 * shown["top"] - h) < 0.51 / 254 * shown["top"] + 1e-4


HOSTILE = ["<script>alert(1)</script>", "</script><img src=x onerror=alert(2)>", "<!--<script>", "\"'>&amp;&#60;b&#62;",
           "\n\t\0", "\u2028\u2029", "\u202egnp.exe\u202c\u200f", "]]>\\u003c{{DATA}}${alert(3)}",
           "<svg onload=alert(4)>"]


@needs_browser
def test_hostile_text_is_shown_and_does_nothing(toy, folders, tmp_path, browser):
    """As words of the vocabulary, as prompt, as id and as the adapter's name. Nothing runs, appears or is asked for."""
    browser.open(toy[1])
    tags = "[...document.querySelectorAll('*')].map(e => e.localName)"
    usual, model = {*browser.run(tags), "br"}, tmp_path / "m"
    shutil.copytree(folders["llada"], model)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocab = {word: i for word, i in tokenizer["model"]["vocab"].items() if i >= len(HOSTILE)}
    vocab |= {word: i for i, word in enumerate(HOSTILE)}
    edit_json(model / "tokenizer.json", model=tokenizer["model"] | {"vocab": vocab})
    row = trajectory(HOSTILE[1], model, 24, 2, 20, 4)
    row |= {"prompt": "".join(HOSTILE), "response": None, "response_token_ids": [*range(len(HOSTILE))] * 2
            + row["response_token_ids"][18:], "decode": {"adapter": HOSTILE[1]}}
    lora.save(adapted(str(model)), tmp_path / "a")
    source = write_lines(tmp_path / "t.jsonl", [row])
    for flags in (["--adapter", f"<b>&lt;{HOSTILE[0]}={tmp_path}/a"], ["--no-model"]):
        path = page_of(tmp_path, "--model", str(model), "--data", source, "--all", *flags)
        browser.open(path)
        for cut in (0, 5, 12):
            browser.run(f"move({cut})")
        shown = browser.run("""[...document.querySelectorAll("#text .tok")].map(e => e.textContent)""")
        assert shown[:9] == shown[9:18] == [x.replace("\n", "↵") for x in HOSTILE]
        assert browser.run('document.querySelector(".prompt").textContent') == "".join(HOSTILE)
        found = browser.run(tags)
        assert set(found) <= usual and found.count("script") == 2 and found.count("b") == 3
        browser.check(path)
        # a script, an image or a request that got in all the same is stopped by the policy
        browser.run("""window.stopped = []
            document.onsecuritypolicyviolation = e => stopped.push(e.effectiveDirective)
            document.body.append(Object.assign(document.createElement("script"), {text: "window.ran = 1"}))
            document.body.append(Object.assign(new Image(), {src: "http://localhost:9/x.png"}))
            fetch("http://localhost:9/").catch(() => 0); 0""")
        for _ in range(100):
            stopped = browser.run("stopped.sort().join()")
        assert stopped == "connect-src,img-src,script-src-elem" and browser.run("window.ran === undefined")


def test_a_character_of_several_tokens_comes_with_the_last():
    text = "a🤖é\u2028"
    class Bytes:
        def decode(self, ids):
            return bytes(ids).decode("utf-8", "replace")
    words = page.split_text(list(text.encode()), Bytes())
    assert "".join(words) == text and words[:5] == ["a", "", "", "", "🤖"]


@needs_browser
def test_a_long_answer_leaves_the_charts_in_sight(folders, tmp_path, browser):
    """256 tokens on a laptop: the text scrolls in a box of its own, to the targets. On a phone nothing is too wide."""
    source = write_lines(tmp_path / "t.jsonl", [trajectory(n, folders["llada"], 256, 16, 250, 40) for n in range(2)])
    path = page_of(tmp_path, "--model", folders["llada"], "--data", source, "--all")
    for dark in (False, True):
        browser.open(path, dark=dark)
        for cut in (0, 7, 15):
            browser.run(f"move({cut})")
            assert browser.run('document.querySelector("table").getBoundingClientRect().bottom <= innerHeight')
            assert browser.run("""(() => { const box = document.getElementById("text").getBoundingClientRect()
                const next = document.querySelector('#text [data-n="1"]').getBoundingClientRect()
                return box.top <= next.top && next.bottom <= box.bottom })()""")
    assert browser.run("document.getElementById('second').hidden")       # no adapter, no second decoding
    light = browser.run("getComputedStyle(document.body).backgroundColor")
    browser.open(path, 390, 844)
    assert browser.run("document.documentElement.scrollWidth") <= 390
    assert browser.run("getComputedStyle(document.body).backgroundColor") != light


@needs_browser
def test_keys_move_the_cut_and_a_screen_reader_is_told(toy, browser):
    browser.open(toy[1])
    headings = browser.run("[...document.querySelectorAll('#maps h3')].map(e => e.textContent.slice(0, 15))")
    assert headings == ["decoded by base", "decoded by b in"]
    steps = max(read_lines(toy[0] / "heldout.jsonl")[0]["decoding_order"]) + 1
    cut = browser.run("cut")
    for key, want in (("ArrowRight", cut + 1), ("ArrowLeft", cut), ("Home", 0), ("ArrowLeft", 0), ("End", steps)):
        browser("Input.dispatchKeyEvent", type="keyDown", key=key)
        assert browser.run("cut") == want
    assert browser.run('document.getElementById("where").textContent') == f"after all {steps} steps"
    browser.run("move(3)")
    said = browser.run('document.getElementById("status").textContent')
    assert said.startswith(f"cut before step 4 of {steps}. base: ") and "pairs in order" in said
    value = browser.run('document.getElementById("cut").getAttribute("aria-valuetext")')
    assert value == f"cut before step 4 of {steps}"
    # everything that can be operated has a name
    nameless = """[...document.querySelectorAll("button, select, input, [role=img]")]
        .filter(e => !(e.getAttribute("aria-label") || e.textContent.trim())).length"""
    assert browser.run(nameless) == 0


def test_without_a_model_the_records_alone_are_shown(toy, tmp_path, monkeypatch):
    """Order, entropy and confidence as logged; with --model words, without it numbers, and no file but the records."""
    source = toy[0] / "heldout.jsonl"
    rows = read_lines(source)
    for flags in ([], ["--model", str(TOY)]):
        if not flags:
            monkeypatch.setattr(page, "read_config", None)
        shown = data_of(page_of(tmp_path, "--no-model", "--all", "--data", str(source), *flags))
        monkeypatch.undo()
        assert shown["names"] == [] and len(shown["records"]) == len(rows)
        for record, row in zip(shown["records"], rows, strict=True):
            found, = record["decodings"]
            assert found["row"] == row["decoding_order"] and found["correct"] == row["correct"]
            for name in ("entropy", "confidence"):
                assert found[name] == pytest.approx(row[name])
            text = "".join(found["words"])
            if flags:
                assert text.partition("∎")[0] == row["response"]
            else:
                assert text.split() == [str(token) for token in row["response_token_ids"]]


@needs_browser
def test_page_without_a_model_says_what_is_missing(toy, tmp_path, browser):
    path = page_of(tmp_path, "--no-model", "--data", f"{toy[0]}/heldout.jsonl", "--window", "4")
    browser.open(path)
    said = browser.run('document.getElementById("caption").textContent')
    assert "Missing" in said and "rank_loss" in said and "--model" in said
    assert browser.run('document.querySelectorAll("table").length') == 0


def test_committed_page_is_small_and_of_this_template():
    assert COMMITTED.stat().st_size <= 200_000
    shown = data_of(COMMITTED)
    assert COMMITTED.read_text() == page.fill_template(shown)
    assert [decoding["by"] for decoding in shown["records"][0]["decodings"]] == ["base", "CE only", "TABOM"]


def test_schematic_is_small_and_nothing_but_a_drawing():
    path = HERE / "study" / "schematic.svg"
    assert path.stat().st_size <= 40_000
    tags = {e.tag.rpartition("}")[2] for e in ElementTree.parse(path).iter()}
    assert not tags & {"script", "image", "foreignObject", "a"}


def test_wrong_flags_and_files_end_in_one_line(toy, folders, tmp_path, refused):
    folder, _ = toy
    own = ["--data", f"{folder}/heldout.jsonl"]
    for words, given in {
        "one token makes no pair": [*own, "--window", "1"],
        "--lam 0": [*own, "--lam", "0"],
        "give one of them": [*own, "--no-model", "--adapter", f"{folder}/a"],
        "adapter_config.json: cannot be read": [*own, "--model", str(TOY), "--adapter", f"{folder}/nowhere"],
        "pass the --model that decoded it": [*own, "--model", folders["llada"]],
        "names no model": ["--data", write_lines(tmp_path / "x.jsonl", [{"id": 1}]), "--no-model"],
        "no record to train on": ["--data", write_lines(tmp_path / "e.jsonl", []), "--model", str(TOY)],
    }.items():
        with refused(words):
            page_of(tmp_path, *given)
    assert not (tmp_path / "page.html").exists()
