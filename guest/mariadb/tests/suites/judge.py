# SPDX-License-Identifier: GPL-2.0-only
"""What a test's result means for the engine.

Many of MariaDB's results were written for an old server or for MyISAM, so a test that fails runs again on
InnoDB, on the same server. What InnoDB says is the measure:

passed       as the suite expects
as InnoDB    not so, but all that was said is what InnoDB says, to the end or to the same error
expected     other than InnoDB, as the file `expected/SUITE/TEST.rdiff` has it, whose first line says why; or
             ended by an error that ERRORS has; or it cannot end well, as `expected/failures.list` says
skipped      mysql-test-run, or the test itself, says that it cannot run here
failed       all else
"""
import difflib
import os
import re
from dataclasses import dataclass

VERDICTS = PASSED, AS_INNODB, EXPECTED, SKIPPED, FAILED = (
    "passed",
    "as InnoDB",
    "expected",
    "skipped",
    "failed",
)
REASON = "reason: "

# What ends a test for a reason of its own.
ERRORS = {
    "ER_BINLOG_STMT_MODE_AND_ROW_ENGINE": "statement-based logging is not offered: ranges are not locked",
}

# What differs from run to run, or is the engine's name.
VOLATILE = [
    (r"MILLRACE|InnoDB", "ENGINE"),
    (r"-(millrace|control)\b", "-ENGINE"),
    (r"/[^\s'\"]*/v/\d+/", "VAR/"),
    (r"#sql[-\w]+", "#sql"),
    # SHOW PROCESSLIST
    (r"^\d+\t(root\tlocalhost\t\S*\t\w+)\t\d+\t", r"N\t\1\tN\t"),
]
# What mysql-test-run says besides what the test itself did.
NOISE = re.compile(
    r"^(CURRENT_TEST: |---|\+\+\+|@@|[ +-]|Test ended at|The result from queries just before|"
    r"More results from| *- (saving|skipping|found)|mysqltest: Logging to|analyze: |"
    r"Result (length|content) mismatch|safe_process|\s*$)"
)


@dataclass
class Verdict:
    """cause: in one line, of what has not passed. diff: from what InnoDB says."""

    suite: str
    test: str
    verdict: str
    cause: str = ""
    diff: str = ""
    seconds: float = 0.0


def plain(text):
    for pattern, word in VOLATILE:
        text = re.sub(pattern, word, text, flags=re.I | re.M)
    return text


def errors(cause):
    """The lines that say why a test did not end, or what a server wrote into its log."""
    lines = [line for line in plain(cause).splitlines() if not NOISE.match(line)]
    return "\n".join(lines)


def difference(theirs, ours):
    lines = difflib.unified_diff(
        plain(theirs).splitlines(), plain(ours).splitlines(), "InnoDB", "MILLRACE", "", "", 3, ""
    )
    return "\n".join(lines) + "\n"


def transcript(result):
    """What a test said and how it ended."""
    return (result.said or "") + "\n" + errors(result.cause)


class Judge:
    """`here`: the folder that has `expected`."""

    def __init__(self, here):
        self.expected = os.path.join(here, "expected")
        self.failures = {}
        with open(os.path.join(self.expected, "failures.list")) as file:
            for line in file:
                name, _, reason = line.partition(": ")
                if reason and not line.startswith("#"):
                    self.failures[name] = reason.strip()

    def rdiff_path(self, suite, test):
        return os.path.join(self.expected, suite, test + ".rdiff")

    def rdiff(self, suite, test):
        """The reason and the difference; no reason: there is none."""
        try:
            with open(self.rdiff_path(suite, test)) as file:
                first, _, rest = file.read().partition("\n")
        except FileNotFoundError:
            return "", ""
        return (first[len(REASON) :].strip(), rest) if first.startswith(REASON) else ("", rest)

    def judge(self, suite, ours, theirs):
        """`theirs`: of InnoDB; None if it was not needed."""
        verdict = Verdict(suite, ours.name, PASSED, seconds=ours.seconds)
        if ours.status == "passed":
            return verdict
        verdict.cause = one_line(ours.cause)
        if ours.status == "skipped":
            verdict.verdict = SKIPPED
            return verdict
        verdict.verdict = FAILED
        verdict.cause = cause_of(ours)
        if theirs is None or ours.said is None or theirs.said is None:
            return verdict
        if plain(transcript(ours)) == plain(transcript(theirs)):
            verdict.verdict = AS_INNODB
            return verdict
        verdict.diff = difference(transcript(theirs), transcript(ours))
        for error, reason in ERRORS.items():
            if re.search(r"^(mysqltest: )?At line .* failed.* %s " % error, ours.cause, re.M):
                verdict.verdict, verdict.cause = EXPECTED, reason
                return verdict
        reason = self.failures.get("%s.%s" % (suite, ours.name))
        if reason:
            verdict.verdict, verdict.cause = EXPECTED, reason
            return verdict
        reason, wanted = self.rdiff(suite, ours.name)
        if wanted == verdict.diff and reason:
            verdict.verdict, verdict.cause = EXPECTED, reason
        elif wanted:
            verdict.cause = "not the difference that is expected"
        return verdict

    def accept(self, verdict):
        """Writes what was found, for somebody to give a reason."""
        path = self.rdiff_path(verdict.suite, verdict.test)
        reason, _ = self.rdiff(verdict.suite, verdict.test)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as file:
            file.write("%s%s\n%s" % (REASON, reason, verdict.diff))


def one_line(text):
    return " ".join(text.split())[:300]


def cause_of(result):
    """The test's own error if it has one, else that it said something else."""
    found = re.search(r"^mysqltest: (?!Logging)(.*)$", result.cause, re.M)
    if found:
        return one_line(found.group(1))
    said = errors(result.cause)
    return one_line(said) if said else "other output"
