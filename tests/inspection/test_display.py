"""nnx.display: a model as a tree, in a notebook or as an HTML page."""

import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import nnx

BROWSERS = (
    "chromium",
    "chromium-browser",
    "chromium-headless-shell",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
)

# The tree is drawn into a shadow root, which --dump-dom leaves out: copy the text that can be seen into the page.
COLLECT = """<script>
const timer = setInterval(() => {  // until the page has unpacked itself, which takes longer on a busy machine
  const roots = [...document.querySelectorAll("*")].map(element => element.shadowRoot).filter(root => root);
  const text = roots.flatMap(root => [...root.children]).map(child => child.innerText).join("\\n");
  if (!text.includes("TinyNet(")) return;
  clearInterval(timer);
  const seen = document.createElement("pre");
  seen.id = "seen";
  seen.textContent = text;
  document.body.append(seen);
}, 100);
</script>"""


class TinyBlock(nnx.Module):
    def __init__(self, *, ctx):
        self.linear = nnx.Linear(2, 2, ctx=ctx)
        self.activation = jax.nn.relu


class TinyNet(nnx.Module):
    def __init__(self, *, ctx):
        self.blocks = [TinyBlock(ctx=ctx), TinyBlock(ctx=ctx)]
        self.heads = {"mean": nnx.Linear(2, 1, ctx=ctx)}
        self.scale = nnx.Param(jnp.ones((2, 3)), sharding=("rows", None))
        self.tied = self.blocks[0].linear
        self.me = self
        self.title = "a <b>bold</b> title"


def model():
    return TinyNet(ctx=nnx.context(0))


def text_of(value, capsys):
    assert nnx.display(value) is None
    return capsys.readouterr().out


def test_a_terminal_shows_what_print_prints(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "treescope", None)  # it is not needed there
    for value in (model(), model().get_state(), nnx.Param(jnp.ones(2)), {"a": jnp.ones(3)}):
        assert text_of(value, capsys) == f"{value}\n"


def test_shared_values_are_shown_once(tmp_path):
    path = nnx.display(model(), tmp_path / "model.html")
    assert path is not None
    assert path.read_text(encoding="utf-8").count("# the same as .blocks[0].linear") == 1


def test_states_variables_and_abstract_models_are_shown(capsys):
    assert "'scale': Param(" in text_of(model().get_state(), capsys)
    assert text_of(nnx.Param(jnp.ones(2)), capsys).startswith("Param(")
    assert "ShapeDtypeStruct" in text_of(nnx.eval_shape(TinyNet, ctx=nnx.context(0)), capsys)


def test_a_module_without_its_state_is_shown(capsys):
    _, moduledef = model().partition()
    assert "TinyBlock(" in text_of(moduledef.merge(), capsys)


def test_a_page_is_complete_in_itself(tmp_path):
    path = nnx.display(model(), tmp_path / "pages" / "model.html")
    assert path == tmp_path / "pages" / "model.html"
    page = path.read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>") and "<title>TinyNet</title>" in page
    assert all(name in page for name in ("TinyBlock", "Linear", "Sequence", "Param"))
    assert "<b>bold</b>" not in page
    assert 'src="http' not in page and 'href="http' not in page
    assert "activation" in page and " object at 0x" not in page  # functions are shown by name, without an address


def test_arrays_may_be_drawn(tmp_path):
    plain = nnx.display(model(), tmp_path / "plain.html")
    drawn = nnx.display(model(), tmp_path / "drawn.html", visualize=True)
    assert plain is not None and drawn is not None
    assert drawn.stat().st_size > plain.stat().st_size


def test_showing_changes_nothing(tmp_path):
    net = model()
    state, moduledef = net.partition()
    nnx.display(net, tmp_path / "model.html")
    assert net.get_state() == state and net.get_module_def() == moduledef


def test_a_missing_library_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "treescope", None)
    with pytest.raises(ImportError, match=r"nnx.display needs the package 'treescope'.*nnx\[display\]"):
        nnx.display(model(), tmp_path / "model.html")


@pytest.mark.skipif(not any(map(shutil.which, BROWSERS)), reason="no browser is installed")
def test_a_browser_shows_the_layer_names(tmp_path):
    browser = next(found for found in map(shutil.which, BROWSERS) if found)
    path = nnx.display(model(), tmp_path / "model.html")
    assert path is not None
    path.write_text(path.read_text(encoding="utf-8").replace("</body>", f"{COLLECT}</body>"), encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=60000", "--dump-dom"]
    run = subprocess.run([browser, *options, path.as_uri()], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    seen = run.stdout.partition('<pre id="seen">')[2]
    assert all(name in seen for name in ("TinyNet(", "TinyBlock(", "Linear(", "Sequence("))
