use super::*;

#[test]
fn structures_have_the_sizes_of_the_specification() {
    assert_eq!(size_of::<Header>(), HEADER_LEN_BYTES);
    assert_eq!(size_of::<VringState>(), 8);
    assert_eq!(size_of::<VringAddr>(), 40);
    assert_eq!(size_of::<Region>(), 32);
    assert_eq!(size_of::<SingleRegion>(), 40);
    assert_eq!(size_of::<Log>(), 16);
    assert_eq!(size_of::<ConfigHeader>(), CONFIG_HEADER_LEN_BYTES as usize);
    assert_eq!(size_of::<Inflight>(), 24);
}

#[test]
fn every_payload_limit_is_below_the_general_one() {
    for request in Request::ALL {
        let max = match request.shape().sizes {
            Sizes::Exact(n) | Sizes::Either(_, n) | Sizes::Range(_, n) => n as usize,
        };
        assert!(max <= MAX_PAYLOAD_LEN_BYTES, "{}", request.name());
    }
}

#[test]
fn ids_and_names_are_those_of_the_specification() {
    for &request in Request::ALL {
        assert_eq!(Request::from_id(request as u32), Some(request));
        assert_eq!(request.message().to_string(), request.name());
    }
    assert_eq!(MessageName(99).to_string(), "message 99");
    assert_eq!(Request::SetVringAddr as u32, 9);
    assert_eq!(Request::AddMemReg as u32, 37);
}

#[test]
fn descriptors_are_counted_by_what_the_payload_says() {
    let kick =
        |word: u64, got| check_fds(Request::SetVringKick, &word.to_ne_bytes(), got, false).is_ok();
    assert!(kick(0, 1) && kick(VRING_NO_FD | 3, 0));
    assert!(!kick(0, 0) && !kick(VRING_NO_FD, 1) && !kick(0, 2));
    let table = |n: u64, got| check_fds(Request::SetMemTable, &n.to_ne_bytes(), got, false);
    assert!(table(3, 3).is_ok());
    let error = table(3, 4).unwrap_err().to_string();
    assert_eq!(error, "SET_MEM_TABLE: 4 file descriptors; 3 expected");
    let cut = check_fds(Request::SetLogFd, &[], 1, true).unwrap_err().to_string();
    assert_eq!(cut, "SET_LOG_FD: more than 1 file descriptors; 1 expected");
}
