"""The chat page in a real browser: what it does with a conversation, with hostile text, and while layers are missing.

Every page is watched: an error on its console (a violated content-security policy is one), an exception, a dialog, or
a request to anybody but its own server fails the test.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from client.api.backend import Begun, Delta, Job
from client.api.site import PAGE
from client.dialogue.messages import ContentDelta, ReasoningDelta
from swarm.base.errors import ContextFull, GenerationInterrupted
from tests.e2e.chat.conftest import Chat
from tests.e2e.pages import NARROW, WIDE, grave_findings, in_browser
from tests.scripted_backend import CARD, Gate, Step, finished, saying

HOSTILE = """<img src=x onerror="document.title='taken'"> <script>document.title='taken'</script>

[click](javascript:document.title='taken') [data](data:text/html,x) ![track](https://evil.example/pixel.png)

<a href="https://evil.example/" onclick="alert(1)">raw</a> [good](https://example.org/a)

```html
<img src=x onerror=alert(1)>
```
"""
SVG = "{http://www.w3.org/2000/svg}"
NEVER = "layers 5-8 are missing"


def token(text: str, number: int = 1) -> dict[str, Any]:
    return {"token": number, "text": text}


def node(text: str, parent: int | None, probability: float, *, is_accepted: bool = False) -> dict[str, Any]:
    more = {"is_accepted": is_accepted, "is_carried": True, "pick": token(" on")}
    return {**token(text), "parent": parent, "probability": probability, **more}


def sweep(number: int, start: int, emitted: list[str], nodes: list[dict[str, Any]]) -> dict[str, Any]:
    hop = {"name": "abcdefgh 0-4", "queue_ms": 1.0, "compute_ms": 6.0, "other_ms": 0.5, "link_ms": 2.0}
    return {
        "number": number,
        "start": start,
        "emitted": [token(text) for text in emitted],
        "root": {**token("The"), "pick": token(emitted[0]) if emitted else None},
        "nodes": nodes,
        "left_out": 0,
        "depth": 2,
        "reason": "as asked",
        "rounds": 2,
        "expected_tokens": 1.2,
        "predicted_ms": 20.0,
        "is_part": False,
        "draft_ms": 3.0,
        "total_ms": 24.0,
        "first_link_ms": 2.0,
        "other_ms": 1.0,
        "hops": [hop, {**hop, "name": "ijklmnop 4-8"}],
    }


SWEEPS = [
    sweep(1, 0, ["The"], []),
    sweep(2, 1, [" tree", " grows", " on"], [
        node(" tree", None, 0.8, is_accepted=True),
        node(" moss", None, 0.1),
        node(" grows", 0, 0.5, is_accepted=True),
    ]),
    {**sweep(3, 4, [], []), "is_part": True},
]  # fmt: skip


def swept(job: Job) -> Iterable[Step]:
    """An answer of two sweeps."""
    yield Begun(5)
    for one in SWEEPS:
        ids = tuple(each["token"] for each in one["emitted"])
        yield Delta((ContentDelta("".join(each["text"] for each in one["emitted"])),), ids, (), (one,))
    yield finished("The tree grows on", 4)


def test_the_files_need_no_inline_code_and_no_other_server() -> None:
    for path in PAGE.glob("*.*"):
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "://" not in text, path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text), path
    index = (PAGE / "index.html").read_text()
    assert not re.search(r"<style|<script>|\sstyle=|\son\w+=", index)
    modules = {str(path.relative_to(PAGE)) for path in PAGE.rglob("*.js")} - {"app.js", "theme.js"}
    assert set(re.findall(r'modulepreload" href="page/([^"]+)"', index)) == modules
    assert all((PAGE / name).exists() for name in re.findall(r'(?:href|src)="page/([^"]+)"', index))
    assert {path.stem for path in (PAGE / "vendor").glob("*.js")} == {
        path.name.removesuffix(".LICENSE.txt") for path in (PAGE / "vendor").glob("*.LICENSE.txt")
    }


@in_browser
def test_an_answer_streams_in_and_stays(chat: Chat) -> None:
    gate = Gate()
    chat.backend.script = lambda job: [
        Begun(7),
        Delta((ReasoningDelta("A greeting."),), (1,)),
        Delta((ContentDelta("Hello, **wor"),), (2, 3)),
        gate,
        Delta((ContentDelta("ld**"),), (4,)),
        finished("Hello, **world**", 4),
    ]
    chat.open()
    expect(chat.input).to_be_focused()
    chat.input.press_sequentially("one")
    chat.input.press("Shift+Enter")
    chat.input.press_sequentially("two")
    assert chat.backend.jobs == []
    chat.input.press("Enter")
    expect(chat.answer.locator("> .prose")).to_have_text("Hello, **wor")
    expect(chat.page.get_by_role("button", name="Stop the answer")).to_be_visible()
    gate.open()
    expect(chat.answer.locator("> .prose strong")).to_have_text("world")
    expect(chat.answer.locator(".facts")).to_contain_text("4 tokens")
    expect(chat.page.locator("#announcer")).to_contain_text("End of the answer.")
    assert [message.content for message in chat.backend.last.messages] == ["one\ntwo"]
    assert chat.backend.last.options["trace"] is True
    chat.open()
    expect(chat.page.locator("article")).to_have_count(2)
    expect(chat.page.locator("article").first).to_contain_text("one\ntwo")
    expect(chat.answer).to_contain_text("Hello, world")
    chat.answer.get_by_text("How it thought").click()
    expect(chat.answer.locator(".reasoning")).to_contain_text("A greeting.")
    chat.answer.get_by_role("button", name="Copy the answer").click()
    assert chat.page.evaluate("navigator.clipboard.readText()") == "Hello, **world**"


FORMULAS = r"""Inline \(a^2\), $e^{i\pi}$ and $$x_1$$; it costs $5 and $6, `$code$`, a\_b.

\[ \begin{aligned} x &= 1 \\ y &= \frac{1}{2} \end{aligned} \]

Not \(\frac{1\), \(\def\a{\a\a}\a\), $\href{javascript:alert(1)}{x}$.

```python
def merge(one):  # both
```
```no-such-language
def
```
"""


@in_browser
def test_formulas_become_mathml_and_code_has_colours(chat: Chat) -> None:
    chat.backend.script = saying(FORMULAS)
    chat.open()
    chat.asked("Show me")
    prose = chat.answer.locator("> .prose")
    expect(prose.locator("math")).to_have_count(4)
    expect(prose.locator("math mfrac")).to_have_count(1)
    expect(prose.locator("math mtr")).to_have_count(2)
    expect(prose.locator("p").first).to_contain_text("it costs $5 and $6, $code$, a_b.")
    expect(prose.locator("p").last).to_have_text(
        r"Not \(\frac{1\), \(\def\a{\a\a}\a\), $\href{javascript:alert(1)}{x}$."
    )
    known, unknown = prose.locator("pre code").all()
    expect(known.locator(".is-keyword")).to_have_text("def")
    expect(known.locator(".is-comment")).to_have_text("# both")
    expect(unknown.locator("span")).to_have_count(0)
    for scheme in ("light", "dark"):
        chat.page.emulate_media(color_scheme=scheme)
        assert grave_findings(chat.page) == []


@in_browser
@pytest.mark.parametrize("text", ["_a" * 900, "*a" * 900, "$a" * 900, "[a](" * 900, "\\(a " * 900])
def test_mark_up_that_takes_too_long_stays_as_it_was_written(chat: Chat, text: str) -> None:
    chat.open()
    shown = """async ([text, stepMs]) => {
      const { render } = await import("/page/markdown.js");
      const holder = document.createElement("div");
      let now = 0;
      let asked = 0;
      render(holder, `**b** ${text}`, () => { asked += 1; return now += stepMs; });
      return [holder.textContent, holder.querySelectorAll("strong").length, asked];
    }"""
    _, strong, _ = chat.page.evaluate(shown, [text, 0])
    assert strong == 1
    late, strong, _ = chat.page.evaluate(shown, [text, 1_000])
    assert (late, strong) == (f"**b** {text}", 0)
    half, strong, asked = chat.page.evaluate(shown, [text, 5])
    assert (half.endswith(text[-900:]), strong) == (True, 1), "what was found in time is shown"
    assert asked < 100, "and nothing is looked for any more"


@in_browser
def test_a_full_context_is_foretold_and_no_dead_end(chat: Chat) -> None:
    chat.backend.model = replace(CARD, context_length=100)
    chat.backend.script = lambda job: [
        Begun(10),
        Delta((ContentDelta("One"),), (1,)),
        finished("One", 1, prompt_tokens=10),
    ]
    chat.open()
    chat.asked("First " * 20)
    expect(chat.page.locator("#context")).to_contain_text("11 of 100 tokens of context")
    expect(chat.page.locator("#leave-out")).to_be_hidden()
    chat.backend.script = lambda job: [
        Begun(85),
        Delta((ContentDelta("Two"),), (1,)),
        finished("Two", 1, prompt_tokens=85),
    ]
    chat.asked("Second")
    expect(chat.page.locator("#leave-out")).to_be_visible()
    chat.backend.script = lambda job: [ContextFull("This model's maximum context length is 100 tokens.")]
    chat.asked("Third")
    chat.errors.clear()  # the browser logs a 400
    expect(chat.answer).to_contain_text("maximum context length is 100 tokens")
    assert grave_findings(chat.page) == []
    chat.backend.script = saying("Here")
    chat.answer.get_by_role("button", name="Leave out the oldest turns, and ask again").click()
    expect(chat.answer).to_contain_text("Here")
    assert [message.content for message in chat.backend.last.messages] == ["Second", "Two", "Third"]
    expect(chat.page.locator("article.is-left-out")).to_have_count(2)
    chat.open()
    expect(chat.page.locator("#left-out")).to_be_visible()
    chat.page.get_by_role("button", name="Read all of it again").click()
    chat.asked("Fourth")
    assert len(chat.backend.last.messages) == 7


@in_browser
def test_escape_stops_an_answer_and_frees_its_run(chat: Chat) -> None:
    chat.backend.script = lambda job: [Begun(7), Delta((ContentDelta("So far"),), (1,)), Gate()]
    chat.open()
    chat.ask("Go on")
    expect(chat.answer).to_contain_text("So far")
    chat.input.press("Escape")
    expect(chat.answer.locator(".facts")).to_contain_text("Stopped")
    expect(chat.answer).to_have_attribute("aria-busy", "false")
    chat.backend.script = saying("Again")
    chat.asked("And now?")
    assert [message.content for message in chat.backend.last.messages] == ["Go on", "So far", "And now?"]
    expect(chat.answer).to_contain_text("Again")
    assert chat.backend.closed == 2


@in_browser
def test_edits_and_other_answers_lose_nothing(chat: Chat) -> None:
    chat.open()
    chat.asked("First")
    chat.backend.script = saying("Another")
    chat.answer.get_by_role("button", name="Answer again").click()
    expect(chat.answer).to_contain_text("Another")
    expect(chat.answer.locator(".versions")).to_contain_text("2/2")
    question = chat.page.locator("article.is-user")
    question.hover()
    question.get_by_role("button", name="Edit, and ask again").click()
    chat.backend.script = saying("To the second")
    field = question.get_by_label("Edit what you said")
    expect(field).to_be_focused()
    field.fill("Second")
    field.press("Enter")
    expect(chat.answer).to_contain_text("To the second")
    assert [message.content for message in chat.backend.last.messages] == ["Second"]
    question.get_by_role("button", name="Version before").click()
    expect(question).to_contain_text("First")
    expect(chat.answer).to_contain_text("Another")
    chat.answer.get_by_role("button", name="Version before").click()
    expect(chat.answer).to_contain_text("Hello")
    chat.open()
    expect(question).to_contain_text("First")
    expect(chat.answer).to_contain_text("Hello")


@in_browser
def test_settings_and_files_reach_the_model(chat: Chat, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("line ```` one")
    (tmp_path / "photo.bin").write_bytes(b"\xff\xd8\x00")
    (tmp_path / "long.txt").write_text("x" * 300_000)
    chat.open()
    chat.page.get_by_role("button", name="Settings").click()
    chat.page.get_by_label("System prompt").fill("Be brief.")
    for label, value in {
        "Temperature": "0.7",
        "Top p": "0.9",
        "Top k": "40",
        "Seed": "11",
        "Most tokens": "64",
    }.items():
        chat.page.get_by_label(label, exact=True).fill(value)
    assert grave_findings(chat.page) == []
    chat.page.get_by_role("button", name="Save").click()
    chat.page.set_input_files("#file", [tmp_path / "notes.txt", tmp_path / "photo.bin", tmp_path / "long.txt"])
    expect(chat.page.locator("#files .chip")).to_have_text(re.compile("notes.txt"))
    expect(chat.page.locator("#composer-problem")).to_contain_text("photo.bin is not a text file")
    expect(chat.page.locator("#composer-problem")).to_contain_text("long.txt has 293 KiB")
    chat.asked("Sum it up")
    job = chat.backend.last
    assert [(message.role, message.content) for message in job.messages] == [
        ("system", "Be brief."),
        ("user", "File: notes.txt\n`````\nline ```` one\n`````\n\nSum it up"),
    ]
    wanted = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "seed": 11, "max_new_tokens": 64}
    assert {name: job.options[name] for name in wanted} == wanted  # type: ignore[literal-required]
    expect(chat.page.locator("article.is-user .chip")).to_contain_text("notes.txt")
    expect(chat.page.locator("#files .chip")).to_have_count(0)


@in_browser
def test_conversations_are_found_renamed_exported_and_deleted(chat: Chat, tmp_path: Path) -> None:
    chat.open()
    chat.asked("About oaks")
    chat.page.get_by_role("button", name="New conversation").first.click()
    chat.backend.script = saying("Needles")
    chat.asked("About firs")
    entries = chat.page.locator(".conversation")
    expect(entries).to_contain_text(["About firs", "About oaks"])
    chat.page.get_by_label("Search conversations").fill("needles")
    expect(entries).to_contain_text(["About firs"])
    entries.hover()
    chat.page.get_by_role("button", name="Rename About firs").click()
    chat.page.get_by_label("Title of the conversation").fill("Evergreens")
    chat.page.get_by_label("Title of the conversation").press("Enter")
    expect(entries).to_contain_text(["Evergreens"])
    entries.hover()
    with chat.page.expect_download() as download:
        chat.page.get_by_role("button", name="Export Evergreens").click()
    download.value.save_as(tmp_path / "kept.md")
    assert (tmp_path / "kept.md").read_text() == "# Evergreens\n\n## You\n\nAbout firs\n\n## Answer\n\nNeedles\n"
    chat.page.get_by_role("button", name="Delete Evergreens").click()
    expect(chat.page.locator("article")).to_have_count(0)
    chat.page.get_by_label("Search conversations").fill("")
    expect(entries).to_have_count(1)
    chat.page.get_by_role("button", name="Take back").click()
    expect(chat.answer).to_contain_text("Needles")
    expect(entries).to_contain_text(["Evergreens", "About oaks"])


@in_browser
def test_one_of_several_models_is_chosen_and_stays_chosen(chat: Chat) -> None:
    chat.backend.others = (replace(CARD, id="people/<b>other</b>"),)
    chat.open()
    models = chat.page.get_by_label("Model", exact=True)
    expect(models).to_have_value(CARD.id)
    models.select_option("people/<b>other</b>")
    chat.asked("Hi")
    chat.open()
    expect(models).to_have_value("people/<b>other</b>")
    chat.asked("Hi again")
    assert chat.backend.asked[-2:] == ["people/<b>other</b>"] * 2
    chat.backend.others = ()
    chat.open()
    expect(models).to_be_hidden()
    chat.asked("Hi")
    assert chat.backend.asked[-1] == CARD.id


def test_what_a_model_writes_is_never_markup(chat: Chat) -> None:
    chat.backend.script = saying(HOSTILE)
    chat.open()
    chat.page.get_by_role("switch", name="How it came").click()
    chat.asked(HOSTILE)
    expect(chat.page.locator("article.is-user")).to_contain_text("<script>document.title='taken'</script>")
    expect(chat.answer).to_contain_text("<img src=x onerror=\"document.title='taken'\">")
    expect(chat.answer.locator(".code code")).to_have_text("<img src=x onerror=alert(1)>")
    expect(chat.answer.locator(".code-language")).to_have_text("html")
    expect(chat.page.locator("img, iframe, article script, [onerror], [onclick]")).to_have_count(0)
    links = chat.answer.locator(".prose a")
    assert links.evaluate_all("all => all.map(link => link.href)") == [
        "https://evil.example/pixel.png",  # the image, as a link that nobody follows by himself
        "https://example.org/a",
    ]
    assert links.evaluate_all("all => all.every(link => link.rel.includes('noreferrer'))")
    assert chat.page.title().endswith("Canopy chat")


@in_browser
def test_how_the_text_came_is_drawn_and_legible_to_everybody(chat: Chat) -> None:
    chat.backend.script = swept
    chat.open()
    chat.asked("Tell me")
    expect(chat.answer.locator(".facts")).to_contain_text("2.00 tokens per sweep")
    switch = chat.page.get_by_role("switch", name="How it came")
    switch.press("Enter")
    expect(switch).to_have_attribute("aria-checked", "true")
    sweeps = chat.answer.locator(".sweep")
    expect(sweeps).to_have_text(["The", " tree grows on"])
    expect(sweeps.nth(1).locator(".is-drafted")).to_have_text([" tree", " grows"])
    expect(sweeps.nth(1).locator(".is-own")).to_have_text([" on"])
    expect(chat.answer.locator(".swept-headline")).to_have_text("4 tokens in 2 trips; one at a time takes 4")
    panel = chat.answer.locator(".sweep-panel")
    expect(panel.locator("h3")).to_have_text("Sweep 2 of 3")
    sweeps.first.hover()
    expect(panel.locator("h3")).to_have_text("Sweep 1 of 3")
    expect(panel).to_contain_text("nothing drafted")
    sweeps.first.focus()
    sweeps.first.press("ArrowRight")
    expect(sweeps.nth(1)).to_be_focused()
    expect(panel).to_contain_text("3 drafted, 2 accepted · 3 tokens · 24 ms")
    expect(panel.locator(".node.is-accepted text")).to_have_text(["tree", "grows"])
    expect(panel.locator(".node.is-pick text")).to_have_text(["on"])
    expect(panel.locator(".node.is-drafted text")).to_have_text(["moss"])
    expect(panel.locator(".fall-name")).to_contain_text(["draft", "to hop 0", "layers 0…3", "layers 4…7", "rest"])
    with chat.page.expect_download() as download:
        panel.get_by_role("button", name="Save this tree as SVG").click()
    saved = ElementTree.parse(download.value.path())
    assert [each.text for each in saved.iter(f"{SVG}text")] == ["The", "tree", "moss", "grows", "on"]
    colours = {each.get("fill") for each in saved.iter(f"{SVG}rect")}
    assert len(colours) > 2
    assert all(colour and colour.startswith("rgb") for colour in colours), "a file has no style sheet"
    for size in (WIDE, NARROW):
        chat.page.set_viewport_size(size)
        for scheme in ("light", "dark"):
            chat.page.emulate_media(color_scheme=scheme)
            assert grave_findings(chat.page) == []
        assert chat.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    chat.open()
    expect(sweeps).to_have_count(2)
    switch.click()
    expect(chat.answer.locator("> .prose")).to_have_text("The tree grows on")


@in_browser
def test_missing_layers_are_said_and_come_back(chat: Chat) -> None:
    line = "node serve demo-model --layers 5-8 --join PEER"
    chat.backend.model = replace(CARD, is_complete=False, missing=("5-8",), serve_line=line)
    chat.page.set_viewport_size(NARROW)
    chat.open()
    expect(chat.page.locator("#trouble")).to_contain_text("Layers 5…7 of demo-model are served by no machine.")
    assert grave_findings(chat.page) == []
    chat.page.get_by_role("button", name="Copy the command").click()
    assert chat.page.evaluate("navigator.clipboard.readText()") == line
    chat.ask("Are you there?")
    expect(chat.page.locator("#composer-problem")).to_contain_text("Layers are missing")
    expect(chat.input).to_have_value("Are you there?")
    chat.backend.model = CARD
    expect(chat.page.locator("#trouble")).to_be_hidden()
    expect(chat.page.locator("#announcer")).to_contain_text("The swarm answers again.")
    chat.input.press("Enter")
    expect(chat.answer).to_contain_text("Hello")


@in_browser
def test_an_answer_that_breaks_off_says_why_and_keeps_what_came(chat: Chat) -> None:
    broken = GenerationInterrupted(NEVER, "So far", [1])
    chat.backend.script = lambda job: [Begun(7), Delta((ContentDelta("So far"),), (1,)), broken]
    chat.open()
    chat.asked("Go on")
    expect(chat.answer.get_by_role("alert")).to_contain_text("The answer broke off:")
    expect(chat.answer).to_contain_text("So far")
    chat.backend.script = saying("Whole")
    chat.answer.get_by_role("button", name="Answer again").click()
    expect(chat.answer).to_contain_text("Whole")
    expect(chat.answer.get_by_role("alert")).to_have_count(0)


@in_browser
def test_two_tabs_of_one_conversation_lose_nothing(chat: Chat) -> None:
    chat.open()
    chat.asked("From the first")
    other = replace(chat, page=chat.page.context.new_page())
    other.open()
    chat.backend.script = saying("Second")
    other.asked("From the second")
    expect(chat.page.locator("article")).to_have_count(4)
    expect(chat.answer).to_contain_text("Second")
    chat.asked("From the first again")
    expect(other.page.locator("article")).to_have_count(6)
    other.page.locator(".conversation").hover()
    other.page.get_by_role("button", name="Delete From the first").click()
    expect(chat.page.locator("article")).to_have_count(0)
    expect(chat.page.locator(".conversation")).to_have_count(0)
    other.page.close()


@in_browser
def test_a_server_that_wants_a_key_is_given_one(chat: Chat) -> None:
    refusal = {"error": {"message": "You didn't provide an API key.", "code": "invalid_api_key"}}
    chat.page.route("**/v1/chat/completions", lambda route: route.fulfill(status=401, json=refusal))
    chat.open()
    chat.asked("Hello?")
    expect(chat.answer.get_by_role("alert")).to_contain_text("No answer: You didn't provide an API key.")
    key = chat.page.get_by_label("API key")
    expect(key).to_be_focused()
    key.fill("sk-mine")
    key.press("Enter")
    chat.page.unroute("**/v1/chat/completions")
    with chat.page.expect_request("**/v1/chat/completions") as asked:
        chat.answer.get_by_role("button", name="Answer again").click()
    assert asked.value.headers["authorization"] == "Bearer sk-mine"
    expect(chat.answer).to_contain_text("Hello")


@in_browser
def test_a_stream_that_ends_without_its_end_is_said(chat: Chat) -> None:
    event = 'data: {"choices": [{"index": 0, "delta": {"content": "So far"}, "finish_reason": null}]}'
    body = f": keep-alive\n\n{event}\n\n"
    headers = {"content-type": "text/event-stream"}
    chat.page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, headers=headers))
    chat.open()
    chat.asked("Go on")
    chat.page.unroute("**/v1/chat/completions")
    expect(chat.answer.get_by_role("alert")).to_contain_text("the connection ended before the answer did")
    expect(chat.answer).to_contain_text("So far")
