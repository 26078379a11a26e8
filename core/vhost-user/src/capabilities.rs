//! Capabilities of a back-end program: `--print-capabilities`, and the description files that VMM
//! managers read (QEMU's `docs/interop/vhost-user.json`, `VHostUserBackendCapabilities` and
//! `VhostUserBackend`).

use serde::Serialize;

use crate::device::DeviceKind;

/// Answer to `--print-capabilities`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Capabilities {
    /// Device type of the schema: `net`, `block` or `vsock`.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// Optional features that the schema knows for this type.
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    pub features: &'static [&'static str],
}

/// Content of a description file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Description {
    /// Text for people.
    pub description: String,
    /// Device type, as in [`Capabilities`].
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// Absolute path of the program.
    pub binary: String,
}

/// Returns the capabilities of our back end for this kind of device.
pub fn capabilities(kind: DeviceKind) -> Capabilities {
    let features: &[&str] = match kind {
        DeviceKind::Block => &["read-only", "blk-file"],
        // The schema has no optional features for these.
        DeviceKind::Net | DeviceKind::Vsock => &[],
    };
    Capabilities { kind: kind.name(), features }
}

/// Returns the line that `--print-capabilities` prints.
pub fn capabilities_json(kind: DeviceKind) -> Result<String, serde_json::Error> {
    serde_json::to_string(&capabilities(kind))
}

/// Returns the content of a description file for a back end installed at `binary`.
pub fn description_json(kind: DeviceKind, binary: &str) -> Result<String, serde_json::Error> {
    serde_json::to_string_pretty(&Description {
        description: format!("Millrace vhost-user {} back end", kind.name()),
        kind: kind.name(),
        binary: binary.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_json_is_what_the_schema_asks() {
        assert_eq!(
            capabilities_json(DeviceKind::Block).unwrap(),
            r#"{"type":"block","features":["read-only","blk-file"]}"#
        );
        assert_eq!(capabilities_json(DeviceKind::Net).unwrap(), r#"{"type":"net"}"#);
        let text = description_json(DeviceKind::Vsock, "/usr/bin/millrace-vsock").unwrap();
        let back: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(back["type"], "vsock");
        assert_eq!(back["binary"], "/usr/bin/millrace-vsock");
    }
}
