use super::*;

fn written(host: &mut TestHost) -> File {
    let file = host.open("a", open::CREATE).unwrap();
    host.append(file, b"synced").unwrap();
    host.sync(file).unwrap();
    host.append(file, b"not").unwrap();
    file
}

#[test]
fn a_crash_keeps_what_was_synced_and_any_part_of_the_rest() {
    let mut seen = std::collections::BTreeSet::new();
    for seed in 0..100 {
        let mut host = TestHost::new(seed);
        written(&mut host);
        host.crash();
        let bytes = host.bytes("a").unwrap();
        assert!(b"syncednot".starts_with(bytes) && bytes.starts_with(b"synced"));
        seen.insert(bytes.len());
    }
    assert_eq!(seen.into_iter().collect::<Vec<_>>(), [6, 7, 8, 9]);
}

#[test]
fn names_that_were_not_synced_may_be_lost_and_removed_ones_come_back() {
    let (mut new, mut old) = ([0; 2], [0; 2]);
    for seed in 0..100 {
        let mut host = TestHost::new(seed);
        written(&mut host);
        host.open("b", open::CREATE).unwrap();
        host.remove("a").unwrap();
        host.crash();
        new[usize::from(host.bytes("b").is_some())] += 1;
        old[usize::from(host.bytes("a").is_some())] += 1;
    }
    assert!(new.iter().chain(&old).all(|&n| n > 20), "{new:?} {old:?}");
}

#[test]
fn durable_replies_are_held_and_a_dead_host_does_nothing() {
    let mut host = TestHost::new(1);
    let file = written(&mut host);
    host.reply(1, 1, 0, b"now").unwrap();
    host.reply(1, 2, reply::DURABLE, b"later").unwrap();
    assert_eq!(host.replies().len(), 1);
    host.release();
    assert_eq!(host.replies()[0].seq, 2);
    host.die_after(1);
    host.append(file, b"x").unwrap();
    assert_eq!(host.append(file, b"y"), Err(Errno::IO));
    assert!(host.reply(1, 3, 0, b"").is_err());
    host.kill();
    assert_eq!(host.bytes("a").unwrap(), b"syncednotx");
}

#[test]
fn faults_come_when_they_are_wanted() {
    let mut host = TestHost::new(1);
    let file = written(&mut host);
    host.fail(Some(Call::Append), 1, 2, Errno::NOSPC);
    let got: Vec<_> = (0..4).map(|_| host.append(file, b"z").is_ok()).collect();
    assert_eq!(got, [true, false, false, true]);
    host.capacity_bytes = host.used_bytes() + 1;
    assert_eq!(host.append(file, b"zz"), Err(Errno::NOSPC));
    assert!(host.append(file, b"z").is_ok());
}
