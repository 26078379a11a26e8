//! The command line: exit codes, JSON, the pages and scripts that are packaged.
#![allow(clippy::unwrap_used)]

mod common;

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{run, text};
use serde_json::Value;

fn packaging(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging").join(file)
}

#[test]
fn version_is_told_in_both_forms() {
    let plain = run(&["version"]);
    assert_eq!(plain.status.code(), Some(0));
    assert_eq!(text(&plain.stdout), format!("millrace {}\n", env!("CARGO_PKG_VERSION")));
    let json: Value = serde_json::from_slice(&run(&["version", "--json"]).stdout).unwrap();
    assert_eq!(json["version"], env!("CARGO_PKG_VERSION"));
}

#[test]
fn exit_codes_tell_what_went_wrong() {
    assert_eq!(run(&["nonsense"]).status.code(), Some(2));
    assert_eq!(run(&["attach"]).status.code(), Some(2));
    let gone = run(&["status", "--socket", "/nonexistent/control.sock"]);
    assert_eq!(gone.status.code(), Some(3));
    assert!(text(&gone.stderr).contains("no daemon answers on /nonexistent/control.sock"));
    let bad = run(&["attach", "--socket", "/nonexistent/x", "vm", "{"]);
    assert_eq!(bad.status.code(), Some(1));
    let missing = run(&["serve", "-c", "/nonexistent/m.toml"]);
    assert_eq!(missing.status.code(), Some(1));
    assert!(text(&missing.stderr).contains("cannot read /nonexistent/m.toml"));
}

#[test]
fn check_tells_every_problem_with_its_place() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.toml");
    let file = path.to_str().unwrap();
    std::fs::write(&path, "[sidecore]\ncount = 0\n[[vm]]\nname = \"a/b\"\n").unwrap();
    let bad = run(&["check", "-c", file]);
    assert_eq!(bad.status.code(), Some(1));
    let told = text(&bad.stderr);
    assert!(told.contains(&format!("{file}:2:9: sidecore.count: is 0")), "{told}");
    assert!(told.contains(&format!("{file}:4:8: vm[0].name: has the character '/'")), "{told}");
    assert_eq!(run(&["serve", "--check-only", "-c", file]).status.code(), Some(1));
    // By name alone, as people write it.
    assert_eq!(text(&run(&["check", file]).stderr), told);
    assert_eq!(run(&["check", file, "-c", file]).status.code(), Some(2));
    let json: Value =
        serde_json::from_slice(&run(&["check", "--json", "-c", file]).stdout).unwrap();
    assert_eq!(json["problems"][1]["location"]["line"], 4);

    let example = packaging("millrace.toml.example");
    let good = run(&["check", "-c", example.to_str().unwrap()]);
    assert_eq!(good.status.code(), Some(0), "{}", text(&good.stderr));
    let shown = run(&["check", "--json", "-c", example.to_str().unwrap()]);
    let json: Value = serde_json::from_slice(&shown.stdout).unwrap();
    assert_eq!(json["vm"][0]["net"][0]["mac"], "02:00:00:00:00:01");
}

#[test]
fn capabilities_are_printed_under_every_name() {
    let dir = tempfile::tempdir().unwrap();
    for (kind, device) in [("blk", "block"), ("net", "net"), ("vsock", "vsock")] {
        let link = dir.path().join(format!("millrace-{kind}"));
        symlink(env!("CARGO_BIN_EXE_millrace"), &link).unwrap();
        // The conventions: all other arguments are ignored.
        let by_name =
            Command::new(&link).args(["--print-capabilities", "--whatever"]).output().unwrap();
        let command = format!("vhost-user-{kind}");
        let by_command = run(&[&command, "--print-capabilities"]);
        assert_eq!((by_name.status.code(), by_command.status.code()), (Some(0), Some(0)));
        assert_eq!(by_name.stdout, by_command.stdout);
        let json: Value = serde_json::from_slice(&by_name.stdout).unwrap();
        assert_eq!(json["type"], device);

        let description = packaging(&format!("vhost-user/50-millrace-{kind}.json"));
        let description: Value =
            serde_json::from_slice(&std::fs::read(description).unwrap()).unwrap();
        assert_eq!(description["type"], device);
        let binary = description["binary"].as_str().unwrap();
        assert!(binary.ends_with(&format!("/millrace-{kind}")), "{binary}");
    }
}

#[test]
fn a_back_end_needs_exactly_one_socket() {
    let image = ["--blk-file=/nonexistent"];
    let run = |more: &[&str]| {
        let args: Vec<&str> =
            ["vhost-user-blk"].iter().chain(&image).chain(more).copied().collect();
        run(&args)
    };
    assert_eq!(run(&[]).status.code(), Some(2));
    assert_eq!(run(&["--fd=9", "--socket-path=/x"]).status.code(), Some(2));
    assert_eq!(run(&["--fd=1"]).status.code(), Some(2));
    let closed = run(&["--fd=99"]);
    assert_eq!(closed.status.code(), Some(1));
    assert!(text(&closed.stderr).contains("--fd=99 is not open"));
    let missing = run(&["--socket-path=/nonexistent/s"]);
    assert_eq!(missing.status.code(), Some(1));
    assert!(text(&missing.stderr).contains("/nonexistent"));
}

/// Else a daemon of a package would disconnect its VMMs at each restart.
#[test]
#[allow(non_snake_case)]
fn abuse_S2_the_units_name_one_holder() {
    let read = |unit: &str| std::fs::read_to_string(packaging(unit)).unwrap();
    let (daemon, holder) = (read("millrace.service"), read("millrace-holder.service"));
    let argument = |unit: &str, option: &str| {
        let mut words = unit.split_whitespace().skip_while(|word| *word != option);
        words.nth(1).map(String::from)
    };
    let socket = argument(&daemon, "--default-holder").unwrap();
    assert_eq!(argument(&holder, "--socket"), Some(socket));
    assert!(daemon.contains("Wants=millrace-holder.service"));
    // The example leaves it to the unit.
    let example = packaging("millrace.toml.example");
    let shown = run(&["check", "--json", example.to_str().unwrap()]);
    let json: Value = serde_json::from_slice(&shown.stdout).unwrap();
    assert_eq!(json["daemon"]["holder"], "default");
}

/// The subcommands that `--help` lists.
fn subcommands() -> Vec<String> {
    let help = text(&run(&["--help"]).stdout);
    let list = help.split("Commands:").nth(1).unwrap().split("Options:").next().unwrap();
    let names = list.lines().filter(|l| l.starts_with("  ") && !l.starts_with("   "));
    names.filter_map(|l| l.split_whitespace().next()).map(String::from).collect()
}

#[test]
fn the_manual_page_knows_every_command_and_exit_code() {
    let page = std::fs::read_to_string(packaging("millrace.1")).unwrap();
    let commands = subcommands();
    assert!(commands.len() >= 12, "{commands:?}");
    for command in commands.iter().filter(|c| *c != "help") {
        assert!(page.contains(&format!(".B {command}")), "millrace.1 does not have {command}");
    }
    for code in 0..=4 {
        assert!(
            page.contains(&format!(".B {code}\n")),
            "millrace.1 does not have exit code {code}"
        );
    }
}

#[test]
fn completions_know_every_command() {
    for shell in ["bash", "zsh", "fish"] {
        let script = text(&run(&["completions", shell]).stdout);
        for command in subcommands() {
            assert!(script.contains(&command), "{shell} does not know {command}");
        }
    }
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let mut child = common::millrace()
        .args(["completions", "bash"])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let told = common::all_of(child.stderr.take().unwrap());
    assert_eq!((child.wait().unwrap().code(), told.as_str()), (Some(0), ""));
}
