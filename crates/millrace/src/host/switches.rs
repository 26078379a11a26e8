//! Switches and their uplinks.

use std::sync::Arc;

use anyhow::Context;
use base::clock::Clock;
use base::counter::QueueStats;
use control::config::{SwitchConfig as Wanted, UplinkConfig};
use net::tap::{Tap, TapConfig};
use net::{NetError, Switch, SwitchConfig};

use super::cores::Core;
use super::engine::once_free;

/// A running switch.
pub struct SwitchEntry {
    /// Its handle.
    pub switch: Switch,
    /// The uplink's interface and counters.
    pub uplink: Option<(String, Arc<QueueStats>)>,
}

/// Starts a switch on `core`.
pub fn start(wanted: &Wanted, core: &Core, clock: &Arc<dyn Clock>) -> anyhow::Result<SwitchEntry> {
    // Its tables and the uplink's buffers are for the sidecore.
    let _near = core.handle.make_near();
    let config = SwitchConfig {
        hold_us: wanted.hold_us,
        mac_age_s: wanted.mac_age_s,
        ..SwitchConfig::new(&wanted.name)
    };
    let switch = Switch::new(&core.handle, config, Arc::clone(clock))
        .with_context(|| format!("starting switch {}", wanted.name))?;
    let uplink = match &wanted.uplink {
        None => None,
        Some(uplink) => Some(
            plug(&switch, uplink)
                .with_context(|| format!("the uplink of switch {}", wanted.name))?,
        ),
    };
    Ok(SwitchEntry { switch, uplink })
}

/// Opens the TAP and makes it the switch's way out.
pub fn plug(switch: &Switch, uplink: &UplinkConfig) -> anyhow::Result<(String, Arc<QueueStats>)> {
    let config = TapConfig {
        name: uplink.tap.clone(),
        bridge: uplink.bridge.clone(),
        offloads: uplink.offloads,
        no_arp: false,
    };
    let is_held = |error: &NetError| match error {
        NetError::Tap { source, .. } => source.kind() == std::io::ErrorKind::ResourceBusy,
        _ => false,
    };
    let tap = once_free(|| Tap::open(&config), is_held)?;
    let (name, uso) = (tap.name().to_owned(), tap.takes_uso());
    let stats = Arc::new(QueueStats::default());
    switch.set_uplink_with(Some(Box::new(tap)), Arc::clone(&stats), uso)?;
    Ok((name, stats))
}
