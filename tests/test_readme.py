"""What the README says to type: it runs as it stands there, and prints what the README says it prints."""
import re
import shlex
import subprocess
import sys

from tests.tiny import HERE

README = (HERE / "README.md").read_text()
BLOCKS = re.findall(r"^```(?:\w*)\n(.*?)^```", README, re.M | re.S)


def pattern(line: str) -> str:
    """Of a printed line: any number for a number, anything for the three dots."""
    return re.sub(r"\d+(\\\.\d+)?(e\\-\d+)?", r"[\\d.]+(e-\\d+)?", re.escape(line)).replace(r"\.\.\.", ".*")


def typed(block: str, tmp_path) -> str:
    """The output of the commands of a block, with out/hand elsewhere."""
    printed = ""
    for command in block.replace("\\\n", " ").strip().splitlines():
        words = shlex.split(command.replace("out/hand", str(tmp_path)))
        assert words[0] == "python"
        done = subprocess.run([sys.executable, *words[1:]], cwd=HERE, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        printed += done.stdout
    return printed.replace(str(tmp_path), "out/hand")


def test_the_commands_by_hand_print_what_the_readme_says(tmp_path):
    n, = [n for n, block in enumerate(BLOCKS) if block.startswith("python study/toy.py")]
    printed = typed(BLOCKS[n], tmp_path)
    assert len(BLOCKS[n + 1].splitlines()) == 6
    for line in BLOCKS[n + 1].splitlines():
        assert re.search(f"^{pattern(line)}$", printed, re.M), (line, printed)


def test_the_prompt_of_the_readme_gets_its_answer(tmp_path):
    block, = [block for block in BLOCKS if "--show" in block]
    printed = re.sub(r"\033\[[\d;]*m", "", typed(block, tmp_path))
    prompt, answer = printed.splitlines()
    assert prompt in block and f"`{answer.rstrip('_')}`" in README


def test_every_file_and_function_that_the_readme_names_exists():
    for path in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (HERE / path).exists(), path
    for file, name in re.findall(r"`(\w+)\.([a-z_0-9]+|Trajectory\.order)`", README):
        if (HERE / f"{file}.py").exists() and name not in ("py", "sh", "md"):
            assert re.search(rf"^ *(def|class) {name.split('.')[-1]}\b", (HERE / f"{file}.py").read_text(), re.M), name
