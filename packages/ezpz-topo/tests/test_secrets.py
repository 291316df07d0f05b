"""Nothing that is secret by its name or its form is left; what is harmless stays readable."""

import time

import pytest

from ezpz_topo import redact

X = "hunter2-x/Y+z"

SECRET_NAMES = [
    "WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "GITHUB_PAT",
    "AWS_ACCESS_KEY_ID_SECRET", "AWS_SESSION_TOKEN", "PGPASSWORD", "MYSQL_PWD", "DB_PASS",
    "SSHPASS", "KEY_PASSPHRASE", "MY_PASSWD", "GOOGLE_APPLICATION_CREDENTIALS", "OPENAI_APIKEY",
    "COMET_KEY", "PRIVATE_KEY", "SIGNING_KEYS", "PBS_JOBCOOKIE", "PYTHON_AUTH", "OAUTH2_CLIENT",
    "HFTOKEN", "MYPASS", "DBPWD", "hf_token", "apiKey", "accessToken", "HFToken", "api-key",
    "x.wandb.api_key", "SESSION_ID", "Cookie", "ACCESS_TOKENS", "client_secret", "JWT",
    "SLACK_WEBHOOK_URL", "DBPassword", "SECRETS", "AZURE_STORAGE_KEY", "SSH_AUTH_SOCK", "_TOKEN",
    "TOKEN_2",
]  # fmt: skip
HARMLESS_NAMES = [
    "KEYBOARD", "MONKEY", "MONKEYS", "PATH", "PWD", "OLDPWD", "AUTHOR", "AUTHORS", "TOKENIZER_PATH",
    "TOKENIZERS_PARALLELISM", "MAX_TOKENS", "tokenizer", "num-key-value-heads", "image-key",
    "sort_key", "PATTERN", "PATIENCE", "PASSES", "COMPASS", "BYPASS", "OMP_NUM_THREADS",
    "MASTER_ADDR", "MASTER_PORT", "KEYSTONE", "COOKIECUTTER", "OBSESSION", "SESSIONS_DIRX", "lr",
    "eos_token_id", "pad-token", "special_tokens_map",
]  # fmt: skip


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_a_secret_name(name):
    assert redact({name: X, "A": "1"}) == {name: "***", "A": "1"}
    assert redact((f"{name}={X} and 'more'",)) == (f"{name}=***",)
    assert redact(("run", f"--{name}", X, "x")) == ("run", f"--{name}", "***", "x")
    assert redact((f"--{name}={X}",)) == (f"--{name}=***",)
    assert redact(("--env", f"{name}={X}")) == ("--env", f"{name}=***")
    assert redact((f"--env={name}={X}",)) == (f"--env={name}=***",)
    assert redact((f"f({name}='{X}')",)) == (f"f({name}='***')",)
    assert redact((f'{{"lr": 1, "{name}": "{X} y", "b": 2}}',)) == (
        f'{{"lr": 1, "{name}": "***", "b": 2}}',
    )


@pytest.mark.parametrize("name", HARMLESS_NAMES)
def test_a_harmless_name(name):
    words = (f"{name}=a b", f"--{name}", "a", f"--{name}=b", f"f({name}='c')", f'{{"{name}": 3}}')
    assert redact(words) == words
    assert redact({name: "value"}) == {name: "value"}


@pytest.mark.parametrize(("text", "left"), [
    (f"postgres://me:{'p%40ss'}@db:5432/x", "postgres://me:***@db:5432/x"),
    ("http://:only-this@proxy:3128", "http://:***@proxy:3128"),
    ("https://u:a:b@c@host/x", "https://u:***@host/x"),
    ("git clone https://oauthname1234567@github.com/a/b", "git clone https://***@github.com/a/b"),
    ("curl -H 'Authorization: Basic dXNlcjpwYXNz' u", "curl -H 'Authorization: ***' u"),
    ("Authorization: Bearer abc.def", "Authorization: ***"),
    ("x Bearer abc.def y", "x Bearer *** y"),
    ("https://h/p?a=1&access_token=abc&b=2", "https://h/p?a=1&access_token=***&b=2"),
    ("https://h/p?sv=1&sig=abc%3D", "https://h/p?sv=1&sig=***"),
    ("s3?X-Amz-Signature=abcdef", "s3?X-Amz-Signature=***"),
    ("https://hooks.slack.com/services/T0/B0/zzz", "https://hooks.slack.com/services/***"),
    ("login(hf_ABCDEFGHIJKLMNOPQRST)", "login(***)"),
    ("ghp_ABCDEFGHIJKLMNOPQRST0123", "***"),
    ("github_pat_ABCDEFGHIJKLMNOPQRST", "***"),
    ("(glpat-ABCDEFGHIJKLMNOPQRST)", "(***)"),
    ("xoxb-ABCDEFGHIJ", "***"),
    ("AIzaABCDEFGHIJKLMNOPQRSTUVWXYZ01234567", "***"),
    ("AUTHORIZATION: x y", "AUTHORIZATION: ***"),
    ("Author\u0131zation: x y", "Author\u0131zation: ***"),
    ("echo sk-proj-ABCDEFGHIJKLMNOPQRST", "echo ***"),
    ("AKIAABCDEFGHIJKLMNOP", "***"),
    ("eyJhbGciOiJI.eyJzdWIiOiIx.c2ln", "***"),
    ("-----BEGIN RSA PRIVATE KEY-----\nMII\n", "-----BEGIN RSA PRIVATE KEY-----***"),
    ("export HF_TOKEN=abc; run --lr 1", "export HF_TOKEN=***; run --lr 1"),
    ("python t.py --api-key abc --lr 1", "python t.py --api-key *** --lr 1"),
    ("python t.py --api-key=abc --lr 1", "python t.py --api-key=*** --lr 1"),
    ("prog --use-auth --lr 1", "prog --use-auth --lr 1"),
    ('os.environ["HF_TOKEN"] = "abc def"', 'os.environ["HF_TOKEN"] = "***"'),
    ('os.environ.setdefault("HF_TOKEN", "abc")', 'os.environ.setdefault("HF_TOKEN", "***")'),
    ('if token == "abc def":', 'if token == "***":'),
    ("lambda: f(token='a b', lr=1)", "lambda: f(token='***', lr=1)"),
    (r'"{\"api_key\": \"abc\", \"lr\": 1}"', r'"{\"api_key\": ***", \"lr\": 1}"'),
    ('["--password", "a b", "--lr"]', '["--password", "***", "--lr"]'),
    ("password: 'it\\'s'", "password: '***'"),
    ('password = "no end', 'password = *** end'),
    ("a=b=HF_TOKEN=c d", "a=b=HF_TOKEN=***"),
    ("+wandb.api_key=abc", "+wandb.api_key=***"),
    ("-DHF_TOKEN=abc", "-DHF_TOKEN=***"),
    ("sorted(x, key=len)", "sorted(x, key=len)"),
    ("the token is not here", "the token is not here"),
    ("ssh://git@host/x http://host:8080/a@b", "ssh://git@host/x http://host:8080/a@b"),
    ("HF_TOKEN=", "HF_TOKEN="),
    ("", ""),
])  # fmt: skip
def test_inside_a_word(text, left):
    assert redact(text) == left
    assert redact((text,)) == (left,)
    assert redact({"A": text}) == {"A": left}


@pytest.mark.parametrize(("words", "left"), [
    (["--token", "-starts-with-a-dash0!"], ["--token", "***"]),
    (["--token", "--lr", "1"], ["--token", "--lr", "1"]),
    (["--token", "--", "x"], ["--token", "***", "x"]),
    (["--key", "x"], ["--key", "***"]),
    (["-token", "x"], ["-token", "***"]),
    (["curl", "Bearer", "x"], ["curl", "Bearer", "***"]),
    (["curl", "BEARER", "x"], ["curl", "BEARER", "***"]),
    (["--token"], ["--token"]),
    (["--password", "a\nb"], ["--password", "***"]),
    (["--password=a\nb"], ["--password=***"]),
    (["HF_TOKEN=\udcff\udcfe"], ["HF_TOKEN=***"]),
    (["\udcff", "-x"], ["\udcff", "-x"]),
])  # fmt: skip
def test_words_in_a_row(words, left):
    assert redact(words) == left
    assert redact(tuple(words)) == tuple(left)


def test_a_configuration():
    class Config(dict):
        pass

    given = {
        "lr": 0.1, "hub": {"api_key": X, "url": "https://me:x@h"}, "use_auth": True, "token": None,
        "password": 12345, "secret": ["a"], 3: "HF_TOKEN=x", "list": [{"api_key": X}, ("a", 1)],
        "run": ["--wandb-key", X, 1], "namespace": "Namespace(api_key='x', lr=1)",
    }  # fmt: skip
    assert redact(Config(given)) == {
        "lr": 0.1, "hub": {"api_key": "***", "url": "https://me:***@h"}, "use_auth": True,
        "token": None, "password": "***", "secret": "***", 3: "HF_TOKEN=***",
        "list": [{"api_key": "***"}, ("a", 1)], "run": ["--wandb-key", "***", 1],
        "namespace": "Namespace(api_key='***', lr=1)",
    }  # fmt: skip
    assert given["hub"]["api_key"] == X, "the caller's stays"
    thing = object()
    assert redact(thing) is thing


def test_twice_is_as_once():
    once = redact(["--token", "x", "HF_TOKEN=y", "f(token='z')", "http://a:b@c"])
    assert redact(once) == once
    assert redact({"A_TOKEN": "", "B_TOKEN": "***"}) == {"A_TOKEN": "", "B_TOKEN": "***"}


@pytest.mark.parametrize(
    "unit", ["a=", "a:", "a ", '"', "\\", "'a", "a.", "--a ", "://a:", "token=", "x" * 9, "?sig="]
)
def test_a_word_takes_time_as_it_is_long(unit):
    def cost(size):
        began = time.process_time()
        redact([unit * (size // len(unit))])
        return time.process_time() - began

    # eight times as long: quadratic is 64 times the cost
    assert cost(131_072) < 32 * cost(16_384) + 0.01
