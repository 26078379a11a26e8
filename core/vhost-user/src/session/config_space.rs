//! Messages about config space: they concern the device alone.

use super::outcome::{Fault, Reply};
use crate::codec::{CONFIG_HEADER_LEN_BYTES, ConfigHeader, MAX_CONFIG_LEN_BYTES, Request, payload};
use crate::device::Device;
use crate::error::VhostUserError;

/// Largest value of `flags` in `SET_CONFIG`: 0 from the driver, 1 for live migration.
const CONFIG_FLAGS_MAX: u32 = 1;

/// Splits a config message into header and content, checked: the content lies in the 256 bytes that
/// the protocol knows, and the sizes agree.
fn parse_part(request: Request, bytes: &[u8]) -> Result<(ConfigHeader, &[u8]), Fault> {
    let header: ConfigHeader = payload(request, bytes)?;
    let content = &bytes[CONFIG_HEADER_LEN_BYTES as usize..];
    if header.size as usize != content.len() {
        return Err(VhostUserError::BadSize {
            message: request.message(),
            got: bytes.len() as u32,
            want: format!("{CONFIG_HEADER_LEN_BYTES} and the {} named in it", header.size),
        }
        .into());
    }
    let fits = header.offset.checked_add(header.size).is_some_and(|e| e <= MAX_CONFIG_LEN_BYTES);
    if !fits {
        return Err(VhostUserError::BadField {
            message: request.message(),
            field: "offset",
            value: u64::from(header.offset),
            rule: format!("offset and size together are at most {MAX_CONFIG_LEN_BYTES}"),
        }
        .into());
    }
    Ok((header, content))
}

/// Handles `GET_CONFIG`.
pub(super) fn get_config(device: &dyn Device, bytes: &[u8]) -> Result<Reply, Fault> {
    let (header, _) = parse_part(Request::GetConfig, bytes)?;
    let mut body = bytes.to_vec();
    let content = &mut body[CONFIG_HEADER_LEN_BYTES as usize..];
    content.fill(0);
    device.read_config(header.offset, content).map_err(|source| {
        let message = Request::GetConfig.message();
        Fault::Refused(VhostUserError::Device { message, source })
    })?;
    Ok(Reply::Body(body))
}

/// Handles `SET_CONFIG`.
pub(super) fn set_config(device: &dyn Device, bytes: &[u8]) -> Result<Reply, Fault> {
    let message = Request::SetConfig.message();
    let (header, content) = parse_part(Request::SetConfig, bytes)?;
    if header.flags > CONFIG_FLAGS_MAX {
        return Err(VhostUserError::BadField {
            message,
            field: "flags",
            value: u64::from(header.flags),
            rule: "0 (driver) or 1 (migration)".to_owned(),
        }
        .into());
    }
    let refused = |source| Fault::Refused(VhostUserError::Device { message, source });
    device.write_config(header.offset, content).map_err(refused)?;
    Ok(Reply::Done)
}
