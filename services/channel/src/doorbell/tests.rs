use proptest::prelude::*;
use rustix::fs::OFlags;

use super::testing::{receive, receive_all};
use super::*;

fn memory() -> Arc<SharedMemory> {
    Arc::new(SharedMemory::new("mailbox", 4096).unwrap())
}

fn inode(fd: impl AsFd) -> u64 {
    rustix::fs::fstat(fd).unwrap().st_ino
}

/// Numbers, and whether a descriptor came with them.
fn heard(connection: &OwnedFd) -> Vec<(i64, bool)> {
    receive_all(connection.as_fd()).iter().map(|(value, fd)| (*value, fd.is_some())).collect()
}

#[test]
fn a_member_is_greeted_and_introduced() {
    let mut server = DoorbellServer::new(2).unwrap();
    let (mine, others) = (memory(), memory());
    let first = server.add(1, mine.clone()).unwrap();
    let greeting = receive_all(first.as_fd());
    let values: Vec<i64> = greeting.iter().map(|(value, _)| *value).collect();
    assert_eq!(values, [0, 1, -1, 1, 1, 0, 0]);
    let with_fd: Vec<bool> = greeting.iter().map(|(_, fd)| fd.is_some()).collect();
    assert_eq!(with_fd, [false, false, true, true, true, true, true]);
    assert_eq!(inode(greeting[2].1.as_ref().unwrap()), inode(&*mine));

    let second = server.add(2, others.clone()).unwrap();
    let greeting = receive_all(second.as_fd());
    let values: Vec<i64> = greeting.iter().map(|(value, _)| *value).collect();
    assert_eq!(values, [0, 2, -1, 2, 2, 0, 0, 1, 1]);
    // Nobody gets the memory of another one.
    assert_eq!(inode(greeting[2].1.as_ref().unwrap()), inode(&*others));
    assert_eq!(heard(&first), [(2, true), (2, true)]);

    server.remove(2);
    server.remove(2);
    // Nobody is told, and the server has closed its end.
    assert!(heard(&first).is_empty());
    assert!(receive(second.as_fd()).is_none());
}

#[test]
fn who_has_an_id_next_has_its_bells_and_nobody_is_told_twice() {
    let mut server = DoorbellServer::new(2).unwrap();
    let first = server.add(1, memory()).unwrap();
    drop(server.add(2, memory()).unwrap());
    let of_second = |fds: Vec<(i64, Option<OwnedFd>)>| -> Vec<Doorbell> {
        let fds = fds.into_iter().filter(|(id, _)| *id == 2).filter_map(|(_, fd)| fd);
        fds.map(|fd| Doorbell::from_peer(fd.into()).unwrap()).collect()
    };
    let known = of_second(receive_all(first.as_fd()));
    server.remove(2);
    known[0].ring().unwrap();
    let second = server.add(2, memory()).unwrap();
    assert!(heard(&first).is_empty());
    let mine = of_second(receive_all(second.as_fd()));
    assert!(!mine[0].drain());
    known[1].ring().unwrap();
    assert!(!mine[0].drain() && mine[1].drain());
}

#[test]
fn everyone_rings_the_one_that_is_meant() {
    let mut server = DoorbellServer::new(3).unwrap();
    let first = server.add(1, memory()).unwrap();
    let second = server.add(2, memory()).unwrap();
    let bells = |connection: &OwnedFd, id| -> Vec<Doorbell> {
        let of = |(value, fd): (i64, Option<OwnedFd>)| fd.filter(|_| value == id);
        let all = receive_all(connection.as_fd()).into_iter().filter_map(of);
        all.map(|fd| Doorbell::from_peer(fd.into()).unwrap()).collect()
    };
    let of_second = bells(&first, 2);
    let mine = bells(&second, 2);
    assert_eq!((of_second.len(), mine.len()), (3, 3));
    of_second[1].ring().unwrap();
    assert!(!mine[0].drain() && mine[1].drain() && !mine[2].drain());
    server.ring(2, 2);
    assert!(mine[2].drain());
    // Nobody there, and no such vector: nothing happens.
    server.ring(9, 0);
    server.ring(2, 3);

    let third = server.add(3, memory()).unwrap();
    let hosts = bells(&third, 0);
    for bell in &hosts {
        assert!(!server.take_calls());
        bell.ring().unwrap();
        assert!(server.take_calls());
    }
}

#[test]
fn a_member_whose_device_is_about_to_go_hears_nothing() {
    let mut server = DoorbellServer::new(2).unwrap();
    let going = server.add(1, memory()).unwrap();
    let mut greeting = receive_all(going.as_fd()).into_iter().skip(3);
    let bell = Doorbell::from_peer(greeting.next().unwrap().1.unwrap().into()).unwrap();
    server.silence(1);
    server.ring(1, 0);
    let _second = server.add(2, memory()).unwrap();
    assert!(!bell.drain() && heard(&going).is_empty());
}

#[test]
fn bells_that_a_member_made_blocking_do_not_block() {
    let mut server = DoorbellServer::new(2).unwrap();
    let connection = server.add(1, memory()).unwrap();
    let bells: Vec<OwnedFd> =
        receive_all(connection.as_fd()).into_iter().skip(3).filter_map(|(_, fd)| fd).collect();
    // The last two are the host's one.
    for bell in &bells[..3] {
        rustix::fs::fcntl_setfl(bell, OFlags::RDWR).unwrap();
        rustix::io::write(bell, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    }
    assert!(server.take_calls() && !server.take_calls());
    server.ring(1, 0);
    server.ring(1, 1);
}

#[test]
fn a_member_that_has_closed_its_end_is_given_up_and_nobody_else() {
    let mut server = DoorbellServer::new(9).unwrap();
    drop(server.add(1, memory()).unwrap());
    let good = server.add(2, memory()).unwrap();
    assert!(server.seats[&1].connection.is_none());
    drop(receive_all(good.as_fd()));
    let _third = server.add(3, memory()).unwrap();
    assert_eq!(heard(&good).len(), 9);
}

#[test]
fn what_does_not_fit_is_said_later() {
    let mut server = DoorbellServer::new(9).unwrap();
    let slow = server.add(1, memory()).unwrap();
    rustix::net::sockopt::set_socket_send_buffer_size(
        server.seats[&1].connection.as_ref().unwrap(),
        4096,
    )
    .unwrap();
    let _others: Vec<OwnedFd> = (2..33).map(|id| server.add(id, memory()).unwrap()).collect();
    assert!(server.waiting().count() > 0);
    let mut got = 0;
    while !server.seats[&1].queue.is_empty() {
        got += heard(&slow).len();
        server.flush();
    }
    got += heard(&slow).len();
    assert_eq!(got, 3 + 9 + 9 + 31 * 9);
}

proptest! {
    /// Members know everyone who is there, and are told once, in whatever order members come and
    /// go.
    #[test]
    fn members_know_who_is_there(
        steps in proptest::collection::vec((1u16..6, any::<bool>()), 1..40),
        vectors in 2u32..6,
    ) {
        let mut server = DoorbellServer::new(vectors).unwrap();
        let mut there: BTreeMap<u16, (OwnedFd, BTreeMap<i64, u32>)> = BTreeMap::new();
        for (id, comes) in steps {
            match (comes, there.contains_key(&id)) {
                (true, false) => {
                    let connection = server.add(id, memory()).unwrap();
                    for expected in [(0, false), (i64::from(id), false), (-1, true)] {
                        let (value, fd) = receive(connection.as_fd()).unwrap();
                        prop_assert_eq!((value, fd.is_some()), expected);
                    }
                    there.insert(id, (connection, BTreeMap::new()));
                }
                (false, true) => {
                    server.remove(id);
                    there.remove(&id);
                }
                _ => {}
            }
            let mut all: Vec<i64> = there.keys().map(|id| i64::from(*id)).collect();
            all.push(HOST_ID.into());
            for (connection, known) in there.values_mut() {
                for (value, fd) in receive_all(connection.as_fd()) {
                    prop_assert!(fd.is_some());
                    *known.entry(value).or_default() += 1;
                }
                prop_assert!(known.values().all(|count| *count == vectors));
                prop_assert!(all.iter().all(|id| known.contains_key(id)));
            }
        }
    }
}
