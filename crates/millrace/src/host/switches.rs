//! Switches and their uplinks.

use std::sync::{Arc, PoisonError, RwLock};

use anyhow::Context;
use base::clock::Clock;
use base::counter::QueueStats;
use control::config::{SwitchConfig as Wanted, UplinkConfig};
use net::tap::{Tap, TapConfig};
use net::{NetError, Switch, SwitchConfig};
use sidecore::Sidecore;

use super::engine::once_free;

/// The daemon's switches, by their order in the config. One whose worker panicked is replaced.
pub struct Switches(RwLock<Vec<Arc<SwitchEntry>>>);

impl Switches {
    /// Those of the start.
    pub fn new(all: Vec<SwitchEntry>) -> Self {
        Self(RwLock::new(all.into_iter().map(Arc::new).collect()))
    }

    /// All of them now.
    pub fn list(&self) -> Vec<Arc<SwitchEntry>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The one of this name.
    pub fn find(&self, name: &str) -> Option<Arc<SwitchEntry>> {
        self.list().into_iter().find(|entry| entry.switch.name() == name)
    }

    /// Puts one in the place of that of its name.
    pub fn replace(&self, entry: SwitchEntry) {
        let mut all = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(place) = all.iter_mut().find(|e| e.switch.name() == entry.switch.name()) {
            *place = Arc::new(entry);
        }
    }
}

/// A running switch.
pub struct SwitchEntry {
    /// Its handle.
    pub switch: Switch,
    /// The uplink's interface and counters.
    pub uplink: Option<(String, Arc<QueueStats>)>,
}

/// Starts a switch on `core`.
pub fn start(
    wanted: &Wanted,
    core: &Sidecore,
    clock: &Arc<dyn Clock>,
) -> anyhow::Result<SwitchEntry> {
    // Its tables and the uplink's buffers are for the sidecore.
    let _near = core.make_near();
    let config = SwitchConfig {
        hold_us: wanted.hold_us,
        mac_age_s: wanted.mac_age_s,
        ..SwitchConfig::new(&wanted.name)
    };
    let switch = Switch::new(core, config, Arc::clone(clock))
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
