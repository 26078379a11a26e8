//! Notifications to systemd.

use std::ffi::OsString;
use std::time::Duration;

/// Sends notifications to the service manager that started the daemon; does nothing without one.
#[derive(Debug, Clone, Default)]
pub struct Notifier {
    socket: Option<OsString>,
    watchdog: Option<Duration>,
}

impl Notifier {
    /// Takes socket and watchdog from `NOTIFY_SOCKET`, `WATCHDOG_USEC` and `WATCHDOG_PID`.
    pub fn from_env() -> Self {
        let watchdog = watchdog(
            std::env::var("WATCHDOG_USEC").ok().as_deref(),
            std::env::var("WATCHDOG_PID").ok().as_deref(),
            std::process::id(),
        );
        Self { socket: std::env::var_os("NOTIFY_SOCKET"), watchdog }
    }

    /// Sends to `socket`: a path, or `@` and an abstract name.
    pub fn to_socket(socket: impl Into<OsString>) -> Self {
        Self { socket: Some(socket.into()), watchdog: None }
    }

    /// Interval for calls of [`Notifier::alive`]: an eighth of the manager's limit, so that one
    /// call that is left out for a short stall does not end the daemon.
    pub fn watchdog_interval(&self) -> Option<Duration> {
        self.socket.as_ref()?;
        self.watchdog.map(|w| w / 8)
    }

    /// Reports that everything is up.
    pub fn ready(&self, status: &str) {
        self.send(&format!("READY=1\nSTATUS={}", line(status)));
    }

    /// Reports that the daemon stops.
    pub fn stopping(&self) {
        self.send("STOPPING=1\nSTATUS=stopping");
    }

    /// Sends one line for `systemctl status`.
    pub fn status(&self, status: &str) {
        self.send(&format!("STATUS={}", line(status)));
    }

    /// Reports that the daemon is alive.
    pub fn alive(&self) {
        self.send("WATCHDOG=1");
    }

    fn send(&self, text: &str) {
        let Some(socket) = &self.socket else {
            return;
        };
        if let Err(e) = base::notify::tell_at(socket, text) {
            tracing::warn!("telling the service manager at {}: {e}", socket.display());
        }
    }
}

/// A status must not smuggle in another assignment.
fn line(status: &str) -> String {
    status.replace(['\n', '\r'], " ")
}

fn watchdog(usec: Option<&str>, pid: Option<&str>, own_pid: u32) -> Option<Duration> {
    // Without WATCHDOG_PID it is meant for us; with it only when it names us.
    if pid.is_some_and(|pid| pid.parse() != Ok(own_pid)) {
        return None;
    }
    usec?.parse().ok().filter(|us| *us > 0).map(Duration::from_micros)
}

#[cfg(test)]
mod tests {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixDatagram};

    use super::*;

    fn receive(socket: &UnixDatagram) -> String {
        let mut buffer = [0u8; 256];
        let n = socket.recv(&mut buffer).unwrap();
        String::from_utf8(buffer[..n].to_vec()).unwrap()
    }

    #[test]
    fn messages_arrive_at_a_path() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let manager = UnixDatagram::bind(&path).unwrap();
        let notifier = Notifier::to_socket(&path);
        notifier.ready("3 ports\nMAINPID=1");
        assert_eq!(receive(&manager), "READY=1\nSTATUS=3 ports MAINPID=1");
        notifier.alive();
        assert_eq!(receive(&manager), "WATCHDOG=1");
        notifier.stopping();
        assert_eq!(receive(&manager), "STOPPING=1\nSTATUS=stopping");
    }

    #[test]
    fn messages_arrive_at_an_abstract_name() {
        let name = format!("millrace-test-{}", std::process::id());
        let manager = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap());
        let manager = manager.unwrap();
        Notifier::to_socket(format!("@{name}")).status("hello");
        assert_eq!(receive(&manager), "STATUS=hello");
    }

    #[test]
    fn without_a_manager_nothing_happens() {
        Notifier::default().ready("x");
        assert_eq!(Notifier::default().watchdog_interval(), None);
        // A manager that went away is no reason to stop serving.
        Notifier::to_socket("/nonexistent/notify").alive();
    }

    #[test]
    fn the_watchdog_is_for_the_named_process_only() {
        let ten = Some(Duration::from_secs(10));
        assert_eq!(watchdog(Some("10000000"), None, 7), ten);
        assert_eq!(watchdog(Some("10000000"), Some("7"), 7), ten);
        assert_eq!(watchdog(Some("10000000"), Some("8"), 7), None);
        assert_eq!(watchdog(Some("0"), None, 7), None);
        assert_eq!(watchdog(Some("soon"), None, 7), None);
        assert_eq!(watchdog(None, None, 7), None);
    }
}
