//! Log lines about frames that are not passed.

use base::counter::DropReason;
use base::reject_log::RejectLog;
use queue::Chain;

use frame::{ETH_LEN, Head, MAX_FRAME, VNET_LEN, ether_type};

/// Explanation of a reason to drop frames, for the log; none where load is the reason.
fn advice(reason: DropReason) -> Option<&'static str> {
    Some(match reason {
        DropReason::Spoofed => {
            "its sender is not what `bind` gives this port; an address that several ports use \
             belongs into `bind_also` of each"
        }
        DropReason::NotAllowed => "a port that is to send such frames names them in `allow`",
        DropReason::Malformed => {
            "its headers make no sense, or ask for what the driver did not negotiate"
        }
        DropReason::TooBig => "longer than its receiver takes, by MTU or by its buffers",
        _ => return None,
    })
}

/// Tells of a frame of the VM behind `port` that was dropped. `head` is what was copied of it,
/// behind a virtio-net header of `vnet_len`.
#[cold]
pub(crate) fn tell(
    log: &mut RejectLog,
    port: &str,
    reason: DropReason,
    (chain, head, vnet_len): (&Chain<'_>, &Head, usize),
    now_ns: u64,
) {
    let Some(advice) = advice(reason) else { return };
    let Some(left_out) = log.admit(reason, now_ns) else { return };
    let (len_bytes, segs) = (chain.readable_len, chain.segs());
    let lens = vnet_len + ETH_LEN..=vnet_len + MAX_FRAME;
    if chain.fault.is_some() || !lens.contains(&(len_bytes as usize)) {
        // Nothing was read of it.
        let fault = chain.fault;
        tracing::warn!(
            port,
            reason = reason.name(),
            left_out,
            "dropped a frame of {len_bytes} bytes with its header, in {segs} pieces ({fault:?})",
        );
        return;
    }
    let vnet = &head.bytes()[..VNET_LEN];
    tracing::warn!(
        port,
        reason = reason.name(),
        left_out,
        "dropped a frame: {advice} (from {} to {}, EtherType {:#06x}, {} bytes in {segs} pieces, \
         virtio-net header {vnet:02x?})",
        head.src(),
        head.dst(),
        ether_type(head.eth()).map_or(0, |(kind, _)| kind),
        head.frame_len(),
    );
}
