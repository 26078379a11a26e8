use super::*;

#[test]
fn a_shortened_frame_ends_in_its_head_or_in_its_body() {
    let head: Vec<u8> = (0..VNET_LEN as u8 + 40).collect();
    let body: Vec<u8> = (100..150).collect();
    // Its buffers are not looked at.
    let guest = Body::Guest { segs: &[], offset: 10, len: 50 };
    for body in [Body::Ours(&body), guest] {
        let frame = Frame { vnet: Vnet::default(), head: &head, body };
        assert_eq!(frame.len(), 90);
        for len in [0, 1, 39, 40, 41, 89, 90] {
            let new = [7; VNET_LEN + 40];
            let vnet = Vnet { flags: 1, ..Vnet::default() };
            let short = frame.shortened(vnet, &new, len);
            assert_eq!((short.len(), short.vnet), (len, vnet));
            assert_eq!(short.head, &new[..VNET_LEN + len.min(40)]);
            assert_eq!(short.body.len(), len.saturating_sub(40));
            match (short.body, body) {
                (Body::Ours(rest), Body::Ours(all)) => assert_eq!(rest, &all[..rest.len()]),
                (Body::Guest { offset, .. }, Body::Guest { .. }) => assert_eq!(offset, 10),
                other => panic!("{other:?}"),
            }
        }
    }
}

#[test]
fn a_body_of_ours_is_one_piece_or_none() {
    let mut out = Vec::with_capacity(MAX_SLICES);
    assert!(Body::Ours(&[]).slices(&mut out) && out.is_empty());
    let bytes = b"abc";
    assert!(Body::Ours(bytes).slices(&mut out));
    let [slice] = out[..] else { panic!("{} pieces", out.len()) };
    assert_eq!((slice.iov_base.cast_const().cast(), slice.iov_len), (bytes.as_ptr(), 3));
}

#[test]
fn a_body_that_its_sender_lacks_has_no_slices() {
    let mut out = Vec::with_capacity(MAX_SLICES);
    assert!(Body::Guest { segs: &[], offset: 0, len: 0 }.slices(&mut out));
    assert!(!Body::Guest { segs: &[], offset: 0, len: 1 }.slices(&mut out));
    assert!(out.is_empty());
}
