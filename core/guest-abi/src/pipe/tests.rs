//! Sizes that others rely on.

use super::*;

#[test]
fn sizes_are_those_of_version_1() {
    let sizes = [
        size_of::<Hello>(),
        size_of::<Welcome>(),
        size_of::<Probe>(),
        size_of::<Probed>(),
        size_of::<Pipe>(),
        size_of::<SocketEnd>(),
        size_of::<FileEnd>(),
        size_of::<Extent>(),
        size_of::<Done>(),
        size_of::<Cancel>(),
        size_of::<Placeholder>(),
        size_of::<PlacesEnd>(),
        size_of::<ProbePlaces>(),
        size_of::<Begun>(),
        size_of::<Own>(),
        size_of::<Take>(),
        size_of::<Taken>(),
    ];
    assert_eq!(sizes, [16, 24, 40, 16, 16, 88, 8, 16, 16, 8, 32, 24, 56, 8, 8, 16, 16]);
}

#[test]
fn the_longest_take_fits_into_a_message() {
    assert!(size_of::<Take>() + MAX_TAKE_BYTES <= crate::frame::MAX_BODY_BYTES as usize);
    assert_eq!(PROBE_BLOCK_BYTES, BLOCK_BYTES);
}

#[test]
fn the_longest_pipe_fits_into_a_message() {
    let ends = 2 * size_of::<FileEnd>().max(size_of::<SocketEnd>());
    let extents = MAX_EXTENTS as usize * size_of::<Extent>();
    assert!(size_of::<Pipe>() + ends + extents <= crate::frame::MAX_BODY_BYTES as usize);
}
