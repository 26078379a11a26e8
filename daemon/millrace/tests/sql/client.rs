//! A client of MySQL's protocol: as much of it as tests need.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

/// After this a test has failed.
const LIMIT: Duration = Duration::from_secs(120);

/// Rows: values as text, or NULL.
pub type Rows = Vec<Vec<Option<Vec<u8>>>>;

/// Why a statement failed: the server's code and words, or the connection's end.
#[derive(Debug)]
pub enum Failed {
    Told(u16, String),
    Lost(#[allow(dead_code)] io::Error),
}

impl From<io::Error> for Failed {
    fn from(error: io::Error) -> Self {
        Self::Lost(error)
    }
}

/// Address of a server.
#[derive(Debug, Clone)]
pub enum Server {
    Unix(PathBuf),
    Tcp(SocketAddr),
}

trait Socket: Read + Write + Send {}
impl<T: Read + Write + Send> Socket for T {}

/// A connection.
pub struct MySql {
    socket: Box<dyn Socket>,
    /// Bytes of answers.
    pub received_bytes: u64,
}

impl MySql {
    /// Connects, with a database if it has a name.
    pub fn connect(server: &Server, database: &str) -> Result<Self, Failed> {
        let socket: Box<dyn Socket> = match server {
            Server::Unix(path) => {
                let socket = UnixStream::connect(path)?;
                socket.set_read_timeout(Some(LIMIT))?;
                Box::new(socket)
            }
            Server::Tcp(address) => {
                let socket = TcpStream::connect(address)?;
                socket.set_read_timeout(Some(LIMIT))?;
                Box::new(socket)
            }
        };
        let mut this = Self { socket, received_bytes: 0 };
        let (_, greeting) = this.packet()?;
        failed(&greeting)?;
        // The protocol of 4.1, with a proof that is empty.
        let with_database = if database.is_empty() { 0 } else { 8 };
        let mut login = (0x8_a205u32 | with_database).to_le_bytes().to_vec();
        login.extend_from_slice(&[0, 0, 0, 1, 45]);
        login.extend_from_slice(&[0; 23]);
        login.extend_from_slice(b"root\0\0");
        if with_database != 0 {
            login.extend_from_slice(database.as_bytes());
            login.push(0);
        }
        login.extend_from_slice(b"mysql_native_password\0");
        this.send(1, &login)?;
        failed(&this.packet()?.1)?;
        Ok(this)
    }

    fn send(&mut self, number: u8, payload: &[u8]) -> io::Result<()> {
        let mut head = (payload.len() as u32).to_le_bytes();
        head[3] = number;
        self.socket.write_all(&[&head, payload].concat())
    }

    fn packet(&mut self) -> io::Result<(u8, Vec<u8>)> {
        let mut head = [0; 4];
        self.socket.read_exact(&mut head)?;
        let mut payload = vec![0; u32::from_le_bytes([head[0], head[1], head[2], 0]) as usize];
        self.socket.read_exact(&mut payload)?;
        self.received_bytes += 4 + payload.len() as u64;
        Ok((head[3], payload))
    }

    /// Executes a statement; its rows, if it has some.
    pub fn ask(&mut self, sql: impl AsRef<[u8]>) -> Result<Rows, Failed> {
        self.send(0, &[b"\x03", sql.as_ref()].concat())?;
        let (_, first) = self.packet()?;
        failed(&first)?;
        if first[0] == 0 {
            return Ok(Vec::new());
        }
        let columns = number(&first).0;
        for _ in 0..=columns {
            self.packet()?;
        }
        let mut rows = Vec::new();
        loop {
            let (_, payload) = self.packet()?;
            failed(&payload)?;
            if payload[0] == 0xfe && payload.len() < 9 {
                return Ok(rows);
            }
            let (mut rest, mut row) = (&payload[..], Vec::new());
            while !rest.is_empty() {
                if rest[0] == 0xfb {
                    row.push(None);
                    rest = &rest[1..];
                } else {
                    let (len, behind) = number(rest);
                    row.push(Some(behind[..len].to_vec()));
                    rest = &behind[len..];
                }
            }
            rows.push(row);
        }
    }

    /// The same, which succeeds; rows as lines, columns between tabs.
    #[track_caller]
    pub fn sql(&mut self, sql: impl AsRef<[u8]>) -> String {
        let text = String::from_utf8_lossy(sql.as_ref()).chars().take(200).collect::<String>();
        match self.ask(sql) {
            Ok(rows) => text_of(&rows),
            Err(error) => panic!("{text}: {error:?}"),
        }
    }

    /// The same, which fails with that code.
    #[track_caller]
    pub fn fails(&mut self, sql: &str) -> (u16, String) {
        match self.ask(sql) {
            Err(Failed::Told(code, text)) => (code, text),
            other => panic!("{sql}: {other:?}"),
        }
    }
}

fn text_of(rows: &Rows) -> String {
    let value = |v: &Option<Vec<u8>>| match v {
        Some(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        None => "NULL".into(),
    };
    let line = |row: &Vec<Option<Vec<u8>>>| row.iter().map(value).collect::<Vec<_>>().join("\t");
    rows.iter().map(line).collect::<Vec<_>>().join("\n")
}

fn failed(payload: &[u8]) -> Result<(), Failed> {
    if payload.first() != Some(&0xff) {
        return Ok(());
    }
    let code = u16::from_le_bytes([payload[1], payload[2]]);
    let text = payload.get(9..).unwrap_or_default();
    Err(Failed::Told(code, String::from_utf8_lossy(text).into_owned()))
}

/// A number in the protocol's encoding, and what is behind it.
fn number(bytes: &[u8]) -> (usize, &[u8]) {
    let len = match bytes[0] {
        0xfc => 2,
        0xfd => 3,
        0xfe => 8,
        small => return (small.into(), &bytes[1..]),
    };
    let mut number = [0; 8];
    number[..len].copy_from_slice(&bytes[1..=len]);
    (u64::from_le_bytes(number) as usize, &bytes[1 + len..])
}
