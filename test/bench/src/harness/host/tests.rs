use super::*;

#[test]
fn interrupts_are_summed_without_timers() {
    let text = "           CPU0       CPU1\n 24:          1          2  IO-APIC   5-edge      x7\n\
                NMI:          0          0   Non-maskable interrupts\n\
                LOC:    9144576    9010542   Local timer interrupts\n\
                RES:         10         20   Rescheduling interrupts\nERR:          3\n";
    assert_eq!(all_but_timers(text), Some(36));
    assert_eq!(all_but_timers(""), None);
    assert!(interrupts().unwrap() > 0);
}

#[test]
fn schedstat_tells_two_times() {
    assert_eq!(schedstat("12 34 5\n"), Some(Times { ran_ns: 12, waited_ns: 34 }));
    assert_eq!(schedstat("12"), None);
    assert!(times(Thread::current()).is_ok());
    let text = times(Thread { pid: Thread::current().pid, tid: u32::MAX }).unwrap_err().to_string();
    assert!(text.contains("/task/4294967295/schedstat"), "{text}");
}

#[test]
fn the_status_file_tells_sleeps() {
    let text = "Name:\tx\nvoluntary_ctxt_switches:\t41\nnonvoluntary_ctxt_switches:\t7\n";
    assert_eq!(voluntary(text), Some(41));
    assert_eq!(voluntary("Name:\tx\n"), None);
}

#[test]
fn a_thread_that_sleeps_is_counted() {
    let (ours, theirs) = (std::sync::mpsc::channel::<()>(), std::sync::mpsc::channel());
    let worker = std::thread::spawn(move || {
        for () in ours.1 {
            theirs.0.send(Thread::current()).unwrap();
        }
    });
    ours.0.send(()).unwrap();
    let thread = theirs.1.recv().unwrap();
    let asleep = || {
        // State S: it waits for the next message.
        let stat = format!("/proc/{}/task/{}/stat", thread.pid, thread.tid);
        while !std::fs::read_to_string(&stat).unwrap().contains(") S ") {
            std::thread::yield_now();
        }
        sleeps(&[thread]).unwrap()
    };
    let before = asleep();
    ours.0.send(()).unwrap();
    theirs.1.recv().unwrap();
    assert!(asleep() > before);
    drop(ours.0);
    worker.join().unwrap();
    assert!(sleeps(&[Thread { pid: Thread::current().pid, tid: u32::MAX }]).is_err());
}

#[test]
fn threads_are_found_by_name() {
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let (tell, told) = std::sync::mpsc::channel();
    let body = move || {
        tell.send(Thread::current()).unwrap();
        let _ = stopped.recv();
    };
    let thread = std::thread::Builder::new().name("find-me-1".into()).spawn(body).unwrap();
    let one = told.recv().unwrap();
    assert_eq!(named(one.pid, "find-me-").unwrap(), [one]);
    let text = named(one.pid, "nobody-").unwrap_err().to_string();
    assert!(text.contains("nobody-*"), "{text}");
    drop(stop);
    thread.join().unwrap();
}

#[test]
fn our_own_system_calls_are_counted() {
    // Needs root and a tracing file system, as a measurement does.
    let Ok(calls) = SystemCalls::start(&[Thread::current()]) else { return };
    let before = calls.count().unwrap();
    for _ in 0..100 {
        let _ = rustix::process::getppid();
    }
    let after = calls.count().unwrap();
    assert!((100..200).contains(&(after.work - before.work)), "{before:?} {after:?}");
    std::thread::yield_now();
    let yielded = calls.count().unwrap();
    assert_eq!(yielded.yields, after.yields + 1);
    assert!(cpu_ns(&[Thread::current()]).unwrap() > 0);
}
