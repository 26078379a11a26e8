use super::*;

const WINDOW: Window = Window { warm_up: Duration::ZERO, length: Duration::from_millis(1) };

fn shell(script: &str) -> Program {
    let mut command = process::command("sh", None);
    command.args(["-c", script]);
    Program { command, parse, ends_by_itself: false }
}

fn run_shell(script: &str) -> Result<Measure, BenchError> {
    let dir = tempfile::tempdir().unwrap();
    run(shell(script), &mut [], [0, 1], WINDOW, dir.path())
}

#[test]
fn a_front_end_may_say_less_or_more_than_we_know() {
    let text = "EAL: hello\n{\"ops\": 10, \"ops_per_s\": 5.5, \"p50_ns\": 1200, \"copies\": 3}\n";
    let r = parse(text).unwrap();
    assert_eq!((r.ops_per_s, r.p50_ns, r.p99_ns, r.lost), (5.5, Some(1200.0), None, 0.0));
    assert_eq!(parse("nothing"), None);
    assert_eq!(parse("{\"ops\": \"many\"}"), None);
}

#[test]
fn an_answer_is_read_when_the_program_ends() {
    let m = run_shell("echo '{\"ops_per_s\": 7}'").unwrap();
    assert_eq!(m.reading.ops_per_s, 7.0);
}

#[test]
fn failures_say_what_the_front_end_said() {
    let text = |script: &str| run_shell(script).unwrap_err().to_string();
    assert_eq!(
        text("echo no socket >&2; exit 2"),
        "the front end ended with exit status: 2: no socket"
    );
    assert_eq!(
        text("echo '{\"ops_per_s\": 0}'"),
        "the front end's answer is not as expected: {\"ops_per_s\": 0}"
    );
    assert!(text("echo segfault").contains("segfault"));
}

#[test]
fn a_back_end_that_died_is_told_first() {
    let dir = tempfile::tempdir().unwrap();
    let mut gone = process::command("sh", None);
    gone.args(["-c", "echo assertion failed; exit 134"]);
    let mut peer = Process::start("peer", &mut gone, dir.path()).unwrap();
    while peer.alive().is_ok() {}
    let e = run(shell("exit 1"), &mut [peer], [0, 1], WINDOW, dir.path()).unwrap_err().to_string();
    assert_eq!(e, "peer: ended with exit status: 134: assertion failed");
}

#[test]
fn the_command_line_says_the_case() {
    let mut bed = Bed::pretend();
    bed.hugepages = true;
    let window = Window { warm_up: Duration::from_millis(200), length: Duration::from_secs(1) };
    let line = |p: Program| -> String {
        let args: Vec<_> = p.command.get_args().map(|a| a.to_string_lossy()).collect();
        args.join(" ")
    };
    let case = |name: &str| {
        crate::suites::peers::case::ALL.into_iter().find(|c| c.name() == name).unwrap()
    };
    let (a, b) = (Path::new("/t/a"), Path::new("/t/b"));
    assert_eq!(
        line(net(&bed, &case("flood64k_packed"), window, a, b)),
        "--pdeathsig KILL /t/frontend net --ring packed --cpu 1 --secs 1 --warmup 0.2 --mode flood \
         --queue-size 256 --mergeable --frame-bytes 65536 --a /t/a --b /t/b --hugepages"
    );
    assert_eq!(
        line(disk(&bed, &case("null_d32"), window, a)),
        "--pdeathsig KILL /t/frontend disk --ring split --cpu 1 --secs 1 --warmup 0.2 --op read \
         --block-bytes 4096 --depth 32 --socket /t/a"
    );
    let window_of = |name: &str| window.of(&case(name));
    assert_eq!(
        line(disk(&bed, &case("qcow2_write_1m_d8"), window_of("qcow2_write_1m_d8"), a)),
        "--pdeathsig KILL /t/frontend disk --ring split --cpu 1 --secs 1 --warmup 0.2 --op write \
         --block-bytes 1048576 --depth 8 --write-cache --sequential --socket /t/a"
    );
    assert_eq!(
        line(disk(&bed, &case("qcow2_backed_4k_d32"), window_of("qcow2_backed_4k_d32"), a)),
        "--pdeathsig KILL /t/frontend disk --ring split --cpu 1 --secs 5 --warmup 5 --op write \
         --block-bytes 4096 --depth 32 --write-cache --once-per-bytes 65536 --socket /t/a"
    );
    (bed.kind, bed.front) = (Kind::VirtioUser, "/t/bench".into());
    assert_eq!(
        line(net(&bed, &case("flood1500_packed"), window, a, b)),
        "--pdeathsig KILL /t/bench virtio-user --ring packed --cpu 1 --secs 1 --warmup 0.2 \
         --frame-bytes 1500 --a /t/a --b /t/b --hugepages"
    );
}

#[test]
fn usage_is_of_the_time_that_counted() {
    let us = [std::process::id()];
    let back_ends: Vec<Snapshot> = (0..4).map(|_| usage::snapshot(&us)).collect();
    let steal = (0..4).map(|_| steal_time::read(&[0, 1])).collect();
    let reads = Reads { back_ends, steal };
    let (first, last) = (&reads.back_ends[1], &reads.back_ends[3]);
    assert_eq!(reads.usage(last.at() - first.at()), last.since(first));
    assert_eq!(reads.usage(Duration::ZERO), None, "one reading is no usage");
    assert_eq!(reads.stolen(Duration::ZERO), 0.0, "one reading tells of no theft");
    let reads = Reads { back_ends: vec![usage::snapshot(&[])], steal: Vec::new() };
    let length = Duration::from_secs(9);
    assert_eq!((reads.usage(length), reads.stolen(length)), (None, 0.0));
}

#[test]
fn virtio_user_takes_the_small_floods() {
    let takes: Vec<String> = crate::suites::peers::case::ALL
        .iter()
        .filter(|c| Kind::VirtioUser.refuses(c).is_none())
        .map(Case::name)
        .collect();
    assert_eq!(
        takes,
        [
            "flood64_split",
            "flood64_in-order",
            "flood64_packed",
            "flood1500_split",
            "flood1500_in-order",
            "flood1500_packed"
        ]
    );
    assert!(crate::suites::peers::case::ALL.iter().all(|c| Kind::Ours.refuses(c).is_none()));
    assert_eq!((Kind::Ours.mark(), Kind::VirtioUser.mark()), (None, Some("virtio-user".into())));
}
