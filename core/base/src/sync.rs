//! Locks that go on after a panic.
//!
//! A panic of one thread while it holds a lock poisons the lock, and every later user would panic
//! in turn. Here a panicked worker is dropped and the daemon goes on, so a poisoned lock is taken
//! all the same. What it guards must hold its invariants between any two statements that may panic.

use std::sync::WaitTimeoutResult;
use std::sync::{
    Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
};
use std::time::Duration;

/// Locks a mutex, poisoned or not.
#[inline]
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Locks for reading, poisoned or not.
#[inline]
pub fn read<T: ?Sized>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

/// Locks for writing, poisoned or not.
#[inline]
pub fn write<T: ?Sized>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for a notification; the mutex may be poisoned meanwhile.
#[inline]
pub fn wait<'a, T>(condvar: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condvar.wait(guard).unwrap_or_else(PoisonError::into_inner)
}

/// Waits for a notification or for `timeout`; the mutex may be poisoned meanwhile.
#[inline]
pub fn wait_timeout<'a, T>(
    condvar: &Condvar,
    guard: MutexGuard<'a, T>,
    timeout: Duration,
) -> (MutexGuard<'a, T>, WaitTimeoutResult) {
    condvar.wait_timeout(guard, timeout).unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn poisoned_locks_are_taken() {
        let (mutex, rw) = (Mutex::new(1), RwLock::new(2));
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let (_first, _second) = (lock(&mutex), write(&rw));
            std::panic::resume_unwind(Box::new(()));
        }));
        assert!(panicked.is_err() && mutex.is_poisoned() && rw.is_poisoned());
        *write(&rw) += *lock(&mutex);
        assert_eq!(*read(&rw), 3);
        let (guard, timeout) = wait_timeout(&Condvar::new(), lock(&mutex), Duration::ZERO);
        assert!(*guard == 1 && timeout.timed_out());
    }
}
