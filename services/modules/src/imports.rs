//! Imports: the functions that a module may call. Each checks its arguments, which are a guest's
//! word in the end.

use std::ops::Range;
use std::time::{Duration, Instant};

use guest_abi::module::{FRAME_BYTES, MAX_BODY_BYTES, failure, flag};
use guest_abi::module_call::{IMPORTS, MAX_LOG_BYTES, log, reply};
use rustix::io::Errno;
use wasmtime::{Caller, Linker};

use crate::conn::unfinished as failed;
use crate::folder::Folder;
use crate::instance_state::{ModuleReply, State, split};
use crate::limits::{FRAME_OVERHEAD_BYTES, GIVEN_REPLIES, SMALL_BYTES};

/// Limit of bytes of one call: the longest row with its headers.
const MAX_RANGE_BYTES: usize = 17 << 20;

/// Limit of random bytes of one call: keys and seeds.
const MAX_RANDOM_BYTES: usize = 4096;

type At<'a, 'b> = &'a mut Caller<'b, State>;

/// Range of a memory that a pointer and a length name. It bounds a call's work: what the host does
/// for a module is not interrupted.
fn range(memory: &[u8], ptr: i32, len: i32) -> Result<Range<usize>, Errno> {
    // Both are unsigned, as far as the module is concerned.
    let (ptr, len) = (ptr as u32 as usize, len as u32 as usize);
    if len > MAX_RANGE_BYTES {
        return Err(Errno::MSGSIZE);
    }
    let end = ptr.checked_add(len).filter(|end| *end <= memory.len()).ok_or(Errno::FAULT)?;
    Ok(ptr..end)
}

fn number(result: Result<u64, Errno>) -> i64 {
    match result {
        Ok(n) => i64::try_from(n).unwrap_or(i64::MAX),
        Err(e) => -i64::from(e.raw_os_error()),
    }
}

fn short(result: Result<u64, Errno>) -> i32 {
    number(result).clamp(i32::MIN.into(), i32::MAX.into()) as i32
}

fn done(result: Result<(), Errno>) -> i32 {
    short(result.map(|()| 0))
}

fn take_reply(
    at: At<'_, '_>,
    seq: i64,
    client: i32,
    flags: i32,
    body: (i32, i32),
) -> Result<(), Errno> {
    let flags = flags as u32;
    if flags & !reply::DURABLE != 0 {
        return Err(Errno::INVAL);
    }
    let (memory, state) = split(at)?;
    let body = &memory[range(memory, body.0, body.1)?];
    if body.len() > MAX_BODY_BYTES as usize {
        return Err(Errno::MSGSIZE);
    }
    if state.replies.len() >= GIVEN_REPLIES {
        return Err(Errno::NOBUFS);
    }
    let mut reply_frame = ModuleReply {
        client: client as u32,
        seq: seq as u64,
        durable: flags & reply::DURABLE != 0,
        flags: 0,
        frame: Vec::new(),
    };
    let len_bytes = FRAME_BYTES + body.len();
    let room = body.len() <= SMALL_BYTES || len_bytes <= state.held.purse().room_bytes();
    if room {
        reply_frame.frame.reserve_exact(len_bytes);
        reply_frame.frame.resize(FRAME_BYTES, 0);
        reply_frame.frame.extend_from_slice(body);
    } else {
        // The module has done it, and cannot be told.
        let text = format!("its reply of {} bytes found no room in the host", body.len());
        (reply_frame.flags, reply_frame.frame) = (flag::FAILED, failed(failure::LIMIT, &text));
    }
    state.held.set(state.held.bytes() + reply_frame.frame.len() + FRAME_OVERHEAD_BYTES);
    state.replies.push(reply_frame);
    Ok(())
}

/// Calls a function of the folder with one name.
fn with_name<T>(
    at: At<'_, '_>,
    (ptr, len): (i32, i32),
    call: impl FnOnce(&mut Folder, &[u8]) -> Result<T, Errno>,
) -> Result<T, Errno> {
    let (memory, state) = split(at)?;
    let name = &memory[range(memory, ptr, len)?];
    call(&mut state.folder, name)
}

fn list(at: At<'_, '_>, ptr: i32, len: i32) -> Result<u64, Errno> {
    let (memory, state) = split(at)?;
    let mut names = Vec::new();
    for name in state.folder.list()? {
        names.extend_from_slice(name.as_bytes());
        names.push(0);
    }
    let range = range(memory, ptr, len)?;
    if names.len() <= range.len() {
        memory[range][..names.len()].copy_from_slice(&names);
    }
    Ok(names.len() as u64)
}

fn rename(at: At<'_, '_>, from: (i32, i32), to: (i32, i32)) -> Result<(), Errno> {
    let (memory, state) = split(at)?;
    let (from, to) = (range(memory, from.0, from.1)?, range(memory, to.0, to.1)?);
    state.folder.rename(&memory[from], &memory[to])
}

fn random(at: At<'_, '_>, ptr: i32, len: i32) -> Result<(), Errno> {
    let (memory, _) = split(at)?;
    let range = range(memory, ptr, len)?;
    if range.len() > MAX_RANDOM_BYTES {
        return Err(Errno::MSGSIZE);
    }
    let mut rest = &mut memory[range];
    while !rest.is_empty() {
        let n = rustix::rand::getrandom(&mut *rest, rustix::rand::GetRandomFlags::empty())?;
        rest = &mut rest[n..];
    }
    Ok(())
}

fn log_line(at: At<'_, '_>, level: i32, ptr: i32, len: i32) -> Result<(), Errno> {
    let (memory, state) = split(at)?;
    if !state.may_log() {
        return Ok(());
    }
    let range = range(memory, ptr, len)?;
    let text = &memory[range.start..range.end.min(range.start + MAX_LOG_BYTES)];
    // Whatever it says stays on one line.
    let text = String::from_utf8_lossy(text).replace(|c: char| c.is_control(), " ");
    let module = &state.name;
    match level as u32 {
        log::ERROR => tracing::error!(%module, "{text}"),
        log::WARN => tracing::warn!(%module, "{text}"),
        log::INFO => tracing::info!(%module, "{text}"),
        log::DEBUG => tracing::debug!(%module, "{text}"),
        _ => return Err(Errno::INVAL),
    }
    Ok(())
}

fn wake_after(state: &mut State, ms: i32) -> Result<(), Errno> {
    let ms = u64::try_from(ms).map_err(|_| Errno::INVAL)?;
    let at = Instant::now() + Duration::from_millis(ms);
    state.wake = Some(state.wake.map_or(at, |soonest| soonest.min(at)));
    Ok(())
}

/// Adds all imports of [`guest_abi::module_call`].
pub(crate) fn add(linker: &mut Linker<State>) -> wasmtime::Result<()> {
    files(linker)?;
    linker.func_wrap(
        IMPORTS,
        "reply",
        |mut at: Caller<'_, State>, client: i32, seq: i64, flags: i32, ptr: i32, len: i32| {
            // A module that goes on without it would leave a client waiting for ever.
            let taken = take_reply(&mut at, seq, client, flags, (ptr, len));
            taken.map(|()| 0).map_err(|e| wasmtime::Error::msg(format!("reply {seq}: {e}")))
        },
    )?;
    linker.func_wrap(IMPORTS, "clock_ms", |at: Caller<'_, State>| -> i64 {
        at.data().began.elapsed().as_millis() as i64
    })?;
    linker.func_wrap(IMPORTS, "random", |mut at: Caller<'_, State>, ptr: i32, len: i32| {
        done(random(&mut at, ptr, len))
    })?;
    linker.func_wrap(IMPORTS, "wake_after", |mut at: Caller<'_, State>, ms: i32| {
        done(wake_after(at.data_mut(), ms))
    })?;
    let log = |mut at: Caller<'_, State>, level: i32, ptr: i32, len: i32| {
        done(log_line(&mut at, level, ptr, len))
    };
    linker.func_wrap(IMPORTS, "log", log)?;
    Ok(())
}

fn files(linker: &mut Linker<State>) -> wasmtime::Result<()> {
    names(linker)?;
    linker.func_wrap(IMPORTS, "file_close", |mut at: Caller<'_, State>, handle: i32| {
        done(at.data_mut().folder.close(handle))
    })?;
    linker.func_wrap(IMPORTS, "file_len", |mut at: Caller<'_, State>, handle: i32| {
        number(at.data_mut().folder.len(handle))
    })?;
    linker.func_wrap(IMPORTS, "file_sync", |mut at: Caller<'_, State>, handle: i32| {
        done(at.data_mut().folder.sync(handle))
    })?;
    linker.func_wrap(
        IMPORTS,
        "file_truncate",
        |mut at: Caller<'_, State>, handle: i32, len: i64| {
            let len = u64::try_from(len).map_err(|_| Errno::INVAL);
            done(len.and_then(|len| at.data_mut().folder.truncate(handle, len)))
        },
    )?;
    bytes(linker)
}

fn names(linker: &mut Linker<State>) -> wasmtime::Result<()> {
    linker.func_wrap(
        IMPORTS,
        "file_open",
        |mut at: Caller<'_, State>, ptr: i32, len: i32, flags: i32| {
            let open = |folder: &mut Folder, name: &[u8]| folder.open(name, flags as u32);
            short(with_name(&mut at, (ptr, len), open).map(|handle| handle as u64))
        },
    )?;
    linker.func_wrap(
        IMPORTS,
        "file_rename",
        |mut at: Caller<'_, State>, from: i32, from_len: i32, to: i32, to_len: i32| {
            done(rename(&mut at, (from, from_len), (to, to_len)))
        },
    )?;
    linker.func_wrap(IMPORTS, "file_remove", |mut at: Caller<'_, State>, ptr: i32, len: i32| {
        done(with_name(&mut at, (ptr, len), Folder::remove))
    })?;
    linker.func_wrap(IMPORTS, "file_list", |mut at: Caller<'_, State>, ptr: i32, len: i32| {
        short(list(&mut at, ptr, len))
    })?;
    Ok(())
}

fn bytes(linker: &mut Linker<State>) -> wasmtime::Result<()> {
    linker.func_wrap(
        IMPORTS,
        "file_read",
        |mut at: Caller<'_, State>, handle: i32, offset: i64, ptr: i32, len: i32| {
            short(split(&mut at).and_then(|(memory, state)| {
                let offset = u64::try_from(offset).map_err(|_| Errno::INVAL)?;
                let range = range(memory, ptr, len)?;
                state.folder.read(handle, offset, &mut memory[range]).map(|n| n as u64)
            }))
        },
    )?;
    linker.func_wrap(
        IMPORTS,
        "file_write",
        |mut at: Caller<'_, State>, handle: i32, offset: i64, ptr: i32, len: i32| {
            done(split(&mut at).and_then(|(memory, state)| {
                let offset = u64::try_from(offset).map_err(|_| Errno::INVAL)?;
                let range = range(memory, ptr, len)?;
                state.folder.write(handle, offset, &memory[range])
            }))
        },
    )?;
    linker.func_wrap(
        IMPORTS,
        "file_append",
        |mut at: Caller<'_, State>, handle: i32, ptr: i32, len: i32| {
            number(split(&mut at).and_then(|(memory, state)| {
                let range = range(memory, ptr, len)?;
                state.folder.append(handle, &memory[range])
            }))
        },
    )?;
    Ok(())
}
