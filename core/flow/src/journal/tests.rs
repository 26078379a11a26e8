use proptest::prelude::*;

use super::*;

fn record(n: u32, is_v6: bool) -> Record {
    let ip = |last: u32| -> IpAddr {
        if is_v6 {
            Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, (last >> 16) as u16, last as u16).into()
        } else {
            std::net::Ipv4Addr::from(0x0a00_0000 | (last & 0xff_ffff)).into()
        }
    };
    Record {
        key: FlowKey { local: ip(n), remote: ip(!n), local_port: 80, remote_port: n as u16 },
        macs: std::array::from_fn(|i| n as u8 ^ i as u8),
        shift: Shift { send: n, receive: n ^ 1, timestamp: n ^ 2 },
        has_twin: n.is_multiple_of(3),
        is_over: n.is_multiple_of(11),
        send_base: n.is_multiple_of(2).then_some(n ^ 3),
        receive_base: n.is_multiple_of(7).then_some(n ^ 8),
        timestamp: (!n.is_multiple_of(5)).then_some(n ^ 4),
        sent_end: n ^ 5,
        guest_from: n ^ 6,
        guest_ack: n ^ 7,
        guest_scale: n as u8 % 15,
    }
}

fn in_folder<T>(run: impl FnOnce(&Path) -> T) -> T {
    let folder = tempfile::tempdir().unwrap();
    run(&folder.path().join("flows"))
}

#[test]
fn the_last_record_of_each_place_is_found_by_the_next_daemon() {
    in_folder(|path| {
        let mut journal = Journal::open(path).unwrap();
        for n in 0..10 {
            journal.put(n % 4, &record(n, n % 2 == 0));
        }
        journal.clear(1);
        drop(journal);
        let mut journal = Journal::open(path).unwrap();
        let wanted = [(0, record(8, true)), (2, record(6, true)), (3, record(7, false))];
        assert_eq!(journal.records(), wanted);
        journal.put(2, &record(11, false));
        assert_eq!(Journal::open(path).unwrap().records()[1], (2, record(11, false)));
    });
}

#[test]
fn a_kill_in_the_middle_of_a_record_leaves_the_one_before() {
    in_folder(|path| {
        let mut journal = Journal::open(path).unwrap();
        journal.put(5, &record(1, false));
        journal.put(5, &record(2, false));
        // As `put` leaves it half way: the older record's number gone, its words partly new.
        let [first, _] = journal.place(5);
        first[0].store(0, Ordering::Relaxed);
        first[3].store(!0, Ordering::Relaxed);
        assert_eq!(Journal::open(path).unwrap().records(), [(5, record(2, false))]);
    });
}

#[test]
fn a_file_of_another_kind_is_made_anew() {
    in_folder(|path| {
        let journal = Journal::open(path).unwrap();
        journal.words()[0].store(7, Ordering::Relaxed);
        journal.words()[HEAD_WORDS].store(7, Ordering::Relaxed);
        assert!(Journal::open(path).unwrap().records().is_empty());
        std::fs::write(path, b"short").unwrap();
        assert!(Journal::open(path).unwrap().records().is_empty());
    });
}

proptest! {
    #[test]
    fn records_come_back_as_they_were(n in any::<u32>(), is_v6 in any::<bool>()) {
        let record = record(n, is_v6);
        prop_assert_eq!(Record::from_words(&record.words()), Some(record));
    }
}
