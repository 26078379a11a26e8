//! Switches and their uplinks.

use std::sync::{Arc, RwLock};

use anyhow::Context;
use base::clock::Clock;
use base::counter::QueueStats;
use base::sync::{read, write};
use config::{Config, SwitchConfig as Wanted, UplinkConfig};
use net::tap::{self, Tap, TapConfig};
use net::{NetError, Switch, SwitchConfig};
use sidecore::Sidecore;

use super::engine::once_free;

/// The daemon's switches, by their order in the config. One whose worker panicked is replaced.
pub struct Switches(RwLock<Vec<Arc<SwitchEntry>>>);

impl Switches {
    /// Makes the list of the daemon's start.
    pub fn new(all: Vec<SwitchEntry>) -> Self {
        Self(RwLock::new(all.into_iter().map(Arc::new).collect()))
    }

    /// Lists all switches.
    pub fn list(&self) -> Vec<Arc<SwitchEntry>> {
        read(&self.0).clone()
    }

    /// Finds the switch of this name.
    pub fn find(&self, name: &str) -> Option<Arc<SwitchEntry>> {
        self.list().into_iter().find(|entry| entry.switch.name() == name)
    }

    /// Replaces the switch of the same name.
    pub fn replace(&self, entry: SwitchEntry) {
        let mut all = write(&self.0);
        if let Some(place) = all.iter_mut().find(|e| e.switch.name() == entry.switch.name()) {
            *place = Arc::new(entry);
        }
    }
}

/// A running switch.
pub struct SwitchEntry {
    /// Handle of the switch.
    pub switch: Switch,
    /// The uplink's interface and counters.
    pub uplink: Option<(String, Arc<QueueStats>)>,
}

impl SwitchEntry {
    /// Raises the uplink's MTU to that of a port that is about to come. The port works without
    /// that, but for long packets from the host.
    pub fn fit_uplink(&self, config: &Config, mtu: u16) {
        let (Some((tap, _)), switch) = (&self.uplink, self.switch.name()) else { return };
        // The first of such ports is told of what it meets, not each.
        let is_longest = tap::mtu_of(tap).is_ok_and(|mtu_now| mtu_now < mtu);
        if let Err(e) = tap::raise_mtu(tap, mtu) {
            tracing::warn!(
                switch,
                "packets of up to {mtu} bytes cannot come in by the uplink: {e}"
            );
        }
        let wanted = config.switches.iter().find(|wanted| wanted.name == switch);
        if let Some(uplink) = wanted.and_then(|wanted| wanted.uplink.as_ref())
            && is_longest
        {
            check_bridge(uplink, mtu);
        }
    }
}

/// The longest packet that a port of this switch takes.
fn longest_mtu(config: &Config, switch: &str) -> u16 {
    let ports = config.vms.iter().flat_map(|vm| &vm.nets).filter(|net| net.switch == switch);
    ports.map(|net| net.mtu).max().unwrap_or(0)
}

/// Tells of a bridge that ends long packets between uplink and wire.
fn check_bridge(uplink: &UplinkConfig, mtu: u16) {
    let Some(bridge) = &uplink.bridge else { return };
    match tap::mtu_of(bridge) {
        Ok(least) if least < mtu => tracing::warn!(
            "bridge {bridge} passes packets of up to {least} bytes, ports have mtu = {mtu}: longer \
             ones end there; give all its members that MTU (ip link set DEV mtu {mtu})"
        ),
        Ok(_) => {}
        Err(e) => tracing::warn!("the MTU of bridge {bridge} is not known: {e}"),
    }
}

/// Starts a switch of the config on `core`.
pub fn start(
    config: &Config,
    wanted: &Wanted,
    core: &Sidecore,
    clock: &Arc<dyn Clock>,
) -> anyhow::Result<SwitchEntry> {
    // Its tables and the uplink's buffers are for the sidecore.
    let _near = core.prefer_node();
    let mtu = longest_mtu(config, &wanted.name);
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
            plug(&switch, uplink, mtu)
                .with_context(|| format!("the uplink of switch {}", wanted.name))?,
        ),
    };
    Ok(SwitchEntry { switch, uplink })
}

/// Opens the TAP, for packets of up to `mtu` bytes, and makes it the switch's way out.
pub fn plug(
    switch: &Switch,
    uplink: &UplinkConfig,
    mtu: u16,
) -> anyhow::Result<(String, Arc<QueueStats>)> {
    let config = TapConfig {
        name: uplink.tap.clone(),
        bridge: uplink.bridge.clone(),
        offloads: uplink.offloads,
        no_arp: false,
        mtu,
    };
    let is_held = |error: &NetError| match error {
        NetError::Tap { source, .. } => source.kind() == std::io::ErrorKind::ResourceBusy,
        _ => false,
    };
    let tap = once_free(|| Tap::open(&config), is_held)?;
    check_bridge(uplink, mtu);
    let (name, uso) = (tap.name().to_owned(), tap.takes_uso());
    let stats = Arc::new(QueueStats::default());
    switch.set_uplink_with(Some(Box::new(tap)), Arc::clone(&stats), uso)?;
    Ok((name, stats))
}
