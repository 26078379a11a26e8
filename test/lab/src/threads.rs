//! Threads of a process that does not answer.

use std::fs;
use std::path::Path;

/// Kernel functions that are shown of a thread's stack, the innermost first.
const FRAMES: usize = 5;

/// A line for each thread of a process: its name, its state as proc(5) has it, and the kernel
/// functions in which it waits, as far as the kernel shows them.
pub(crate) fn shown(pid: u32) -> String {
    let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else { return String::new() };
    let mut lines: Vec<String> = tasks.flatten().map(|task| line(&task.path())).collect();
    lines.sort();
    lines.concat()
}

fn line(task: &Path) -> String {
    let read = |name: &str| fs::read_to_string(task.join(name)).unwrap_or_default();
    let stat = read("stat");
    // The name may have any characters, parentheses too.
    let state = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().next());
    let stack = read("stack");
    let function = |frame: &str| frame.split_whitespace().last().map(str::to_owned);
    let frames: Vec<String> = stack.lines().filter_map(function).take(FRAMES).collect();
    format!("{} {} {}\n", read("comm").trim(), state.unwrap_or("?"), frames.join(" < "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_thread_has_a_line() {
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::Builder::new()
            .name("waits (long)".into())
            .spawn(move || ended.recv())
            .unwrap();
        let wanted = |line: &str| line.starts_with("waits (long) ");
        // Its name is there once it runs.
        while !shown(std::process::id()).lines().any(wanted) {
            std::thread::yield_now();
        }
        drop(end);
        let _ = thread.join().unwrap();
        assert_eq!(shown(u32::MAX), "");
    }
}
