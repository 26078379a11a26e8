//! Lines of memcached's text protocol.

/// Longest key.
pub const MAX_KEY_BYTES: usize = 250;
/// Longest value.
pub const MAX_VALUE_BYTES: usize = 1 << 20;
/// Longest line.
pub const MAX_LINE_BYTES: usize = 64 << 10;
/// Longer data than this is not even skipped.
const MAX_SKIPPED_BYTES: u64 = 1 << 30;

/// Mode in which a value is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Store in any case.
    Set,
    /// Store if the key has no value.
    Add,
    /// Store if the key has a value.
    Replace,
    /// Append to the value.
    Append,
    /// Prepend to the value.
    Prepend,
    /// Store if the value has this number.
    Cas(u64),
}

/// Value that is to be stored; its data follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Store<'a> {
    /// Key.
    pub key: &'a [u8],
    /// Mode in which it is stored.
    pub mode: Mode,
    /// Flags, of which only clients know what they mean.
    pub flags: u32,
    /// Expiry.
    pub expiry: i64,
    /// Bytes of the data.
    pub len: usize,
}

/// Command of a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command<'a> {
    /// Gets the values of keys, which are separated by spaces.
    Get {
        /// Keys, at least one.
        keys: &'a [u8],
        /// Whether values come with their numbers.
        with_cas: bool,
        /// New expiry of the keys.
        expiry: Option<i64>,
    },
    /// Stores a value.
    Store(Store<'a>),
    /// Removes a key.
    Delete(&'a [u8]),
    /// Adds to a number, or subtracts from it.
    Count {
        /// Key.
        key: &'a [u8],
        /// Amount.
        by: u64,
        /// Add.
        is_up: bool,
    },
    /// Another expiry.
    Touch(&'a [u8], i64),
    /// Removes all, after so many seconds.
    Flush(i64),
    /// Numbers.
    Stats,
    /// Numbers of another kind, which there are none of.
    OtherStats,
    /// Asks for the version of this program.
    Version,
    /// Sets how much is logged: ignored.
    Verbosity,
    /// The end.
    Quit,
}

/// Fault of a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommandError {
    /// The line is no command.
    Unknown,
    /// A part of it makes no sense.
    Format,
    /// A number to add is none.
    Delta,
    /// An expiry is none.
    Expiry,
    /// The length of data is none: nobody knows where the next command begins.
    Length,
    /// The data are too long; so many bytes are to be skipped.
    TooLarge(u64),
    /// Another part makes no sense, and so many bytes of data are to be skipped.
    Data(u64),
}

/// A line, without its end: what it says, and whether there is to be no reply.
///
/// # Errors
/// It is wrong.
pub fn parse(line: &[u8]) -> Result<(Command<'_>, bool), CommandError> {
    let mut words = line.split(|&b| b == b' ').filter(|w| !w.is_empty());
    let name = words.next().ok_or(CommandError::Unknown)?;
    let command = match name {
        b"get" => return get(&line[3..], false).map(|c| (c, false)),
        b"gets" => return get(&line[4..], true).map(|c| (c, false)),
        b"gat" | b"gats" => return get_and_touch(line, name).map(|c| (c, false)),
        b"stats" => {
            return match words.next() {
                None => Ok((Command::Stats, false)),
                Some(b"noreply") => Err(CommandError::Format),
                Some(_) => Ok((Command::OtherStats, false)),
            };
        }
        b"set" | b"add" | b"replace" | b"append" | b"prepend" | b"cas" => {
            return store(name, words);
        }
        b"delete" => Command::Delete(key(words.next())?),
        b"incr" | b"decr" => {
            let (key, by) = (key(words.next())?, words.next().ok_or(CommandError::Unknown)?);
            let by = number(by).ok_or(CommandError::Delta)?;
            Command::Count { key, by, is_up: name == b"incr" }
        }
        b"touch" => Command::Touch(key(words.next())?, expiry(words.next())?),
        b"flush_all" => Command::Flush(0),
        b"version" => Command::Version,
        b"verbosity" => {
            words.clone().next().ok_or(CommandError::Unknown)?;
            Command::Verbosity
        }
        b"quit" => Command::Quit,
        _ => return Err(CommandError::Unknown),
    };
    rest(command, words)
}

/// Words that may stand at the end of commands without data.
fn rest<'a>(
    command: Command<'a>,
    words: impl Iterator<Item = &'a [u8]>,
) -> Result<(Command<'a>, bool), CommandError> {
    let (mut command, mut is_quiet, mut count) = (command, false, 0);
    for word in words {
        count += 1;
        match (&mut command, word) {
            // These are asked for their answer.
            (Command::Version | Command::Quit, _) => return Err(CommandError::Format),
            (_, b"noreply") => is_quiet = true,
            (_, _) if is_quiet || count > 1 => return Err(CommandError::Format),
            (Command::Flush(delay), word) => *delay = expiry(Some(word))?,
            // Once it was a time.
            (Command::Delete(_), b"0") | (Command::Verbosity, _) => {}
            _ => return Err(CommandError::Format),
        }
    }
    Ok((command, is_quiet))
}

fn get(keys: &[u8], with_cas: bool) -> Result<Command<'_>, CommandError> {
    let mut all = keys.split(|&b| b == b' ').filter(|w| !w.is_empty()).peekable();
    all.peek().ok_or(CommandError::Unknown)?;
    all.try_for_each(|word| key(Some(word)).map(drop))?;
    Ok(Command::Get { keys, with_cas, expiry: None })
}

fn get_and_touch<'a>(line: &'a [u8], name: &[u8]) -> Result<Command<'a>, CommandError> {
    let start = line.iter().position(|&b| b != b' ').unwrap_or(0) + name.len();
    let line = &line[start..];
    let time = line.iter().position(|&b| b != b' ').ok_or(CommandError::Unknown)?;
    let len = line[time..].iter().position(|&b| b == b' ').ok_or(CommandError::Unknown)?;
    let at = expiry(Some(&line[time..time + len]))?;
    match get(&line[time + len..], name == b"gats")? {
        Command::Get { keys, with_cas, .. } => {
            Ok(Command::Get { keys, with_cas, expiry: Some(at) })
        }
        other => Ok(other),
    }
}

fn store<'a>(
    name: &[u8],
    mut words: impl Iterator<Item = &'a [u8]>,
) -> Result<(Command<'a>, bool), CommandError> {
    let mut word = || words.next().ok_or(CommandError::Length);
    let (key_word, flags, time, len) = (word()?, word()?, word()?, word()?);
    let len = number(len).filter(|len| *len <= MAX_SKIPPED_BYTES).ok_or(CommandError::Length)?;
    // From here on it is known where the next command begins.
    let wrong = CommandError::Data(len + 2);
    let cas = match name {
        b"cas" => Some(words.next().and_then(number).ok_or(wrong)?),
        _ => None,
    };
    let is_quiet = match words.next() {
        None => false,
        Some(b"noreply") => true,
        Some(_) => return Err(wrong),
    };
    let key = key(Some(key_word)).map_err(|_| wrong)?;
    let flags = number(flags).and_then(|f| u32::try_from(f).ok()).ok_or(wrong)?;
    let expiry = expiry(Some(time)).map_err(|_| wrong)?;
    if words.next().is_some() {
        return Err(wrong);
    }
    if len > MAX_VALUE_BYTES as u64 {
        return Err(CommandError::TooLarge(len + 2));
    }
    let mode = match (name, cas) {
        (b"add", _) => Mode::Add,
        (b"replace", _) => Mode::Replace,
        (b"append", _) => Mode::Append,
        (b"prepend", _) => Mode::Prepend,
        (_, Some(cas)) => Mode::Cas(cas),
        _ => Mode::Set,
    };
    Ok((Command::Store(Store { key, mode, flags, expiry, len: len as usize }), is_quiet))
}

fn key(word: Option<&[u8]>) -> Result<&[u8], CommandError> {
    let word = word.ok_or(CommandError::Unknown)?;
    let fine = word.len() <= MAX_KEY_BYTES && word.iter().all(|&b| b > b' ' && b != 0x7f);
    fine.then_some(word).ok_or(CommandError::Format)
}

fn expiry(word: Option<&[u8]>) -> Result<i64, CommandError> {
    let word = word.ok_or(CommandError::Unknown)?;
    let (sign, digits) = match word.strip_prefix(b"-") {
        Some(digits) => (-1, digits),
        None => (1, word),
    };
    let number = number(digits).and_then(|n| i64::try_from(n).ok()).ok_or(CommandError::Expiry)?;
    Ok(sign * number)
}

/// Digits, and nothing else.
pub fn number(word: &[u8]) -> Option<u64> {
    let fine = !word.is_empty() && word.iter().all(u8::is_ascii_digit);
    fine.then(|| core::str::from_utf8(word).ok()?.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(line: &str) -> Result<(Command<'_>, bool), CommandError> {
        parse(line.as_bytes())
    }

    #[test]
    fn lines_are_what_they_say() {
        let keys = |keys: &'static str, with_cas, expiry| {
            Ok((Command::Get { keys: keys.as_bytes(), with_cas, expiry }, false))
        };
        assert_eq!(told("get a"), keys(" a", false, None));
        assert_eq!(told("gets a b"), keys(" a b", true, None));
        assert_eq!(told("gats -5 a b"), keys(" a b", true, Some(-5)));
        let store = |mode, quiet| {
            Ok((Command::Store(Store { key: b"k", mode, flags: 7, expiry: 60, len: 3 }), quiet))
        };
        assert_eq!(told("set k 7 60 3"), store(Mode::Set, false));
        assert_eq!(told("append k 7 60 3 noreply"), store(Mode::Append, true));
        assert_eq!(told("cas k 7 60 3 99 noreply"), store(Mode::Cas(99), true));
        assert_eq!(told("delete k 0 noreply"), Ok((Command::Delete(b"k"), true)));
        assert_eq!(told("flush_all 10"), Ok((Command::Flush(10), false)));
        assert_eq!(told("flush_all noreply"), Ok((Command::Flush(0), true)));
        assert_eq!(told("touch k -1"), Ok((Command::Touch(b"k", -1), false)));
        let count = Command::Count { key: b"k", by: u64::MAX, is_up: false };
        assert_eq!(told("decr k 18446744073709551615"), Ok((count, false)));
    }

    #[test]
    fn wrong_lines_are_told_apart() {
        let long = "k".repeat(251);
        for (line, wrong) in [
            ("", CommandError::Unknown),
            ("mg k", CommandError::Unknown),
            ("get", CommandError::Unknown),
            ("GET k", CommandError::Unknown),
            (&std::format!("get a {long}"), CommandError::Format),
            ("get a\tb", CommandError::Format),
            ("set k 0 0", CommandError::Length),
            ("set k 0 0 -1", CommandError::Length),
            ("set k 0 0 99999999999", CommandError::Length),
            ("set k 0 0 x", CommandError::Length),
            ("set k 4294967296 0 5", CommandError::Data(7)),
            ("set k 0 x 5", CommandError::Data(7)),
            ("set k 0 0 5 what", CommandError::Data(7)),
            (&std::format!("set {long} 0 0 5"), CommandError::Data(7)),
            ("set k 0 0 1048577", CommandError::TooLarge(1_048_579)),
            ("incr k x", CommandError::Delta),
            ("incr k 18446744073709551616", CommandError::Delta),
            ("delete k 5", CommandError::Format),
            ("touch k x", CommandError::Expiry),
            ("verbosity", CommandError::Unknown),
            ("version noreply", CommandError::Format),
            ("quit now", CommandError::Format),
        ] {
            assert_eq!(told(line), Err(wrong), "{line}");
        }
    }
}
