"""The repository keeps the rules of `architecture.py`, and every rule can fail."""

from pathlib import PurePosixPath

import pytest
from architecture import (
    DOCUMENT_FOLDERS,
    DOCUMENTS,
    ROOT,
    RULES,
    Rule,
    Source,
    document_violations,
    empty_kernels_package,
    file_length,
    function_length,
    heavy_imports,
    heavy_modules_after,
    import_arrows,
    lazy_imports,
    name_violations,
    no_assert,
    no_literal_tolerance,
    parameter_count,
    repository_paths,
    repository_sources,
)

NINE = "a, b, c, d, e, f, g, h, i"


def body(lines: int) -> str:
    """A function (or, indented, a method) of that many lines."""
    return "def f():\n" + "    x = 1\n" * (lines - 1)


def method(lines: int) -> str:
    return "class C:\n    def f(self):\n" + "        x = 1\n" * (lines - 1)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_repository_keeps_the_rule(rule: Rule) -> None:
    assert [violation for source in repository_sources() for violation in rule(source)] == []


def test_names() -> None:
    assert list(name_violations(repository_paths())) == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_paths_in_documents_exist(name: str) -> None:
    assert list(document_violations(name, (ROOT / name).read_text(), repository_paths(DOCUMENT_FOLDERS))) == []


def test_import_pma_is_light() -> None:
    assert heavy_modules_after("import pma") == set()


REJECTED = [
    (import_arrows, "pma/jagged/a.py", "from pma.numerics import AttentionNumerics"),
    (import_arrows, "pma/numerics.py", "import pma.jagged.row_blocks"),
    (import_arrows, "pma/checks.py", "from . import jagged"),
    (import_arrows, "pma/layouts/a.py", "from ..reference import norm"),
    (import_arrows, "pma/layouts/a.py", "from pma import PMA"),
    (import_arrows, "pma/functional.py", "from pma.testing import make_events"),
    (import_arrows, "pma/modules/a.py", "import pma"),
    (import_arrows, "pma/modules/a.py", "import pma.attic"),
    (import_arrows, "pma/reference/a.py", "def f():\n    import_module('pma.ops')"),
    (import_arrows, "pma/reference/a.py", "if TYPE_CHECKING:\n    from pma.ops import autograd"),
    (import_arrows, "pma/reference/a.py", "import ptxsim"),
    (import_arrows, "pma/attic.py", ""),
    (import_arrows, "ptxsim/a.py", "from pma.layouts import BLOCK"),
    (lazy_imports, "pma/functional.py", "def f():\n    from pma.ops import autograd"),
    (lazy_imports, "pma/ops/a.py", "def f():\n    from pma.layouts import BLOCK"),
    (lazy_imports, "pma/jagged/a.py", "class C:\n    def f(self):\n        from . import row_blocks"),
    (heavy_imports, "pma/ops/a.py", "def f():\n    import cutlass.cute as cute"),
    (heavy_imports, "pma/layouts/a.py", "from quack.gemm import gemm"),
    (heavy_imports, "pma/jagged/a.py", "import torchrec"),
    (heavy_imports, "pma/jagged/a.py", "if TYPE_CHECKING:\n    pass\nelse:\n    import torchrec"),
    (heavy_imports, "pma/modules/a.py", "def f():\n    from torchrec import KeyedTensor"),
    (empty_kernels_package, "pma/kernels/__init__.py", "import torch"),
    (file_length, "pma/a.py", "x = 1\n" * 601),
    (file_length, "tests/a.py", "x = 1\n" * 601),
    (file_length, "pma/kernels/a.py", "x = 1\n" * 901),
    (function_length, "benchmarks/a.py", body(81)),
    (function_length, "pma/ops/a.py", method(81)),
    (function_length, "pma/kernels/a.py", body(81)),
    (function_length, "pma/kernels/a.py", method(151)),
    (parameter_count, "pma/functional.py", f"def f({NINE}): ..."),
    (parameter_count, "pma/functional.py", f"def f(*, {NINE}): ..."),
    (parameter_count, "pma/modules/a.py", f"class C:\n    def forward(self, {NINE}): ..."),
    (parameter_count, "pma/reference/a.py", f"class C:\n    def __init__(self, {NINE}): ..."),
    (parameter_count, "pma/reference/a.py", f"@custom_op\ndef f({NINE}): ..."),
    (parameter_count, "pma/ops/a.py", f"@cache\ndef f({NINE}): ..."),
    (parameter_count, "pma/ops/a.py", f"class C(Function):\n    def other(self, {NINE}): ..."),
    (no_assert, "pma/testing.py", "assert True"),
    (no_literal_tolerance, "tests/a.py", "close(a, b, atol=1e-3)"),
    (no_literal_tolerance, "tests/a.py", "close(a, b, rtol=2 * 2**-8)"),
    (no_literal_tolerance, "tests/a.py", "a == pytest.approx(b, rel=-0.1)"),
]

ACCEPTED = [
    (
        import_arrows,
        "pma/jagged/a.py",
        "from pma.jagged.row_blocks import RowBlocks\nfrom pma.checks import check_size",
    ),
    (import_arrows, "pma/layouts/a.py", "from pma import jagged, numerics"),
    (import_arrows, "pma/__init__.py", "from pma.modules import PMA"),
    (import_arrows, "pma/testing.py", "import pma"),
    (import_arrows, "tests/a.py", "import pma, ptxsim"),
    (lazy_imports, "pma/ops/a.py", "def f():\n    from pma.kernels.pool_forward import sm90"),
    (lazy_imports, "tests/a.py", "def f():\n    import pma"),
    (heavy_imports, "pma/kernels/pool_forward/sm90.py", "import cutlass, quack"),
    (heavy_imports, "pma/jagged/a.py", "def f():\n    import torchrec"),
    (heavy_imports, "pma/modules/a.py", "if TYPE_CHECKING:\n    from torchrec import KeyedTensor"),
    (empty_kernels_package, "pma/kernels/__init__.py", "# nothing\n"),
    (file_length, "pma/a.py", "x = 1\n" * 600),
    (function_length, "pma/kernels/a.py", method(150)),
    (function_length, "pma/ops/a.py", body(80)),
    (parameter_count, "pma/reference/a.py", "class C:\n    def f(self, a, b, c, d, e, f, g, h): ..."),
    (parameter_count, "pma/modules/a.py", f"class C:\n    def __init__(self, {NINE}): ..."),
    (parameter_count, "pma/ops/a.py", f"@torch.library.custom_op('pma::f', mutates_args=())\ndef f({NINE}): ..."),
    (parameter_count, "pma/ops/a.py", f"@f.register_fake\ndef _({NINE}): ..."),
    (parameter_count, "pma/ops/a.py", f"class C(torch.autograd.Function):\n    def forward(ctx, {NINE}): ..."),
    (no_assert, "tests/a.py", "assert True"),
    (no_literal_tolerance, "tests/a.py", "close(a, b, atol=budget.atol, rtol=0)"),
    (no_literal_tolerance, "pma/testing.py", "close(a, b, atol=1e-3)"),
]


@pytest.mark.parametrize(("rule", "path", "text"), REJECTED)
def test_rule_rejects(rule: Rule, path: str, text: str) -> None:
    assert list(rule(Source.parse(path, text)))


@pytest.mark.parametrize(("rule", "path", "text"), ACCEPTED)
def test_rule_accepts(rule: Rule, path: str, text: str) -> None:
    assert list(rule(Source.parse(path, text))) == []


def test_every_rule_has_a_rejected_example() -> None:
    assert {rule for rule, _, _ in REJECTED} == set(RULES)


@pytest.mark.parametrize(
    ("paths", "count"),
    [
        (["pma/utils.py"], 1),
        (["pma/common/a.py"], 1),
        (["pma/schedule.py", "pma/scheduler.py"], 1),
        (["pma/processor.py", "pma/processor_/a.py"], 1),
        (["pma/jagged/a.py", "pma/ragged.py", "pma/sm90.py", "pma/sm9.py", "tests/test_pma.py"], 0),
        (["pma/gemm.py", "tests/gemms.py"], 0),
    ],
)
def test_name_rule(paths: list[str], count: int) -> None:
    assert len(list(name_violations(map(PurePosixPath, paths)))) == count


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("see `pma/gone.py`", 1),
        ("see `gone.py`", 1),
        ("run `python scripts/gone --fast`", 1),
        ("see `pma/gone/`", 1),
        ("see `pma/*.cfg`", 1),
        ("see `pma/checks.py:12`, `pma/ops/`, `checks.py`, `pma/*.py`, `scripts/test -k x`", 0),
        ("`torch.compile`, `offsets[b]//32`, `dP/dS`, `ml-100k/u.data`, `.py`, `0.1.0`", 0),
        ("```\n`pma/gone.py`\n```", 0),
    ],
)
def test_document_rule(text: str, count: int) -> None:
    paths = [PurePosixPath(path) for path in ("pma/checks.py", "pma/ops/autograd.py", "scripts/test")]
    assert len(list(document_violations("README.md", text, paths))) == count


def test_heavy_modules_are_seen() -> None:
    assert heavy_modules_after("import json.decoder", heavy={"json", "cutlass"}) == {"json"}
