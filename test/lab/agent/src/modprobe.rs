//! Loading kernel modules from the lab's own list.
//!
//! The image holds `/lab/modules.list`: one line per module, `name alias… : path path…`, the paths
//! in load order with the module itself last. The lab resolved them on the host, so the guest
//! needs no dependency search. The kernel calls the same code through `/sbin/modprobe`.

use std::ffi::CString;
use std::fs::{self, File};

use crate::AgentError;

/// The list's place in the image.
pub const LIST: &str = "/lab/modules.list";

/// Loads a module with everything it needs. A module that the list does not have is taken as built
/// into the kernel.
///
/// # Errors
/// The list or a module cannot be read, or the kernel refuses the module.
pub fn load(name: &str) -> Result<(), AgentError> {
    let list = fs::read_to_string(LIST).map_err(AgentError::file("read", LIST))?;
    for path in find(&list, name).unwrap_or_default() {
        let file = File::open(path).map_err(AgentError::file("open module", path))?;
        let options = CString::default();
        match rustix::system::finit_module(&file, &options, 0) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(error) => return Err(AgentError::file("load module", path)(error.into())),
        }
    }
    Ok(())
}

/// The paths for a module's name or alias, `-` and `_` being the same.
fn find<'a>(list: &'a str, name: &str) -> Option<Vec<&'a str>> {
    let plain = |text: &str| text.replace('-', "_");
    let wanted = plain(name);
    list.lines().find_map(|line| {
        let (names, paths) = line.split_once(" : ")?;
        names
            .split_ascii_whitespace()
            .any(|name| plain(name) == wanted)
            .then(|| paths.split_ascii_whitespace().collect())
    })
}

/// `modprobe [-q] [--] NAME…` as the kernel and mount programs call it.
///
/// # Errors
/// As [`load`]; a name that is not in the list is an error here, so that the caller looks further.
pub fn main(arguments: &[String]) -> Result<(), AgentError> {
    let list = fs::read_to_string(LIST).map_err(AgentError::file("read", LIST))?;
    for name in arguments.iter().filter(|argument| !argument.starts_with('-')) {
        if find(&list, name).is_none() {
            return Err(AgentError::Refused(format!("module {name} is not in {LIST}")));
        }
        load(name)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::find;

    #[test]
    fn names_and_aliases_are_found_with_either_dash() {
        let list = "xfs fs-xfs : /m/libcrc32c.ko /m/xfs.ko\nvirtio_net : /m/virtio_net.ko\n";
        assert_eq!(find(list, "fs-xfs").unwrap(), ["/m/libcrc32c.ko", "/m/xfs.ko"]);
        assert_eq!(find(list, "virtio-net").unwrap(), ["/m/virtio_net.ko"]);
        assert_eq!(find(list, "virtio"), None);
    }
}
