//! Growing the disk of an image while it is served.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use base::sync::write;

use super::clear::Clear;
use super::read::Scratch;
use super::{Chain, ChainView};
use crate::error::Error;
use crate::format::entry::BAD;
use crate::format::header::place;
use crate::limits::{MAX_DISK_LEN_BYTES, MAX_L1_LEN_BYTES};
use crate::map::image::{Image, L1, points_nowhere};
use crate::map::writer::{Meta, Writer};

impl Chain {
    /// Grows the disk to `len_bytes`. What is new reads as zeroes.
    pub fn grow(&self, view: &mut ChainView, len_bytes: u64) -> Result<(), Error> {
        // The rest of the last cluster is zeroed where it is found.
        let stay = self.enter(view);
        let result = self.grow_to(view, len_bytes);
        self.leave(view, stay);
        if let (Err(Error::Io { .. }), Some(writer)) = (&result, &self.top.writer) {
            writer.note_leaks();
        }
        result
    }

    fn grow_to(&self, view: &mut ChainView, len_bytes: u64) -> Result<(), Error> {
        let image = &*self.top;
        let before = image.len_bytes();
        if len_bytes == before {
            return Ok(());
        }
        let header = &image.header;
        let refuse = |text: &str| Err(Error::NotServed(text.into()));
        if len_bytes < before {
            return refuse(
                "a qcow2 image is made smaller while no daemon serves it (qemu-img resize --shrink)",
            );
        }
        if len_bytes > MAX_DISK_LEN_BYTES || !len_bytes.is_multiple_of(512) {
            let rule = format!("a multiple of 512, at most {MAX_DISK_LEN_BYTES}");
            return Err(Error::header("the new size", len_bytes, rule));
        }
        if header.geometry.version < 3 && header.snapshots > 0 {
            return refuse(
                "an image of version 2 with snapshots is not resized (qemu-img amend -o compat=1.1)",
            );
        }
        if header.bitmaps.is_some() {
            return refuse(
                "an image with bitmaps is not resized while it is served (qemu-img bitmap --remove)",
            );
        }
        let writer = image.writer().map_err(Error::io("growing the disk"))?;
        let mut meta = writer.meta();
        image.grow_l1(writer, &mut meta, len_bytes)?;
        drop(meta);
        image.grow_data(len_bytes).map_err(Error::io("growing the data file"))?;
        self.hide_old(view, before, len_bytes).map_err(Error::io("growing the disk"))?;
        let meta = writer.meta();
        image.sync().map_err(Error::io("growing the disk"))?;
        image.write_size(len_bytes, &image.l1()).map_err(Error::io("writing the new size"))?;
        image.len_bytes.store(len_bytes, Ordering::Release);
        drop(meta);
        Ok(())
    }

    /// Neither the rest of the disk's last cluster, which a larger disk may have left there, nor a
    /// backing file that is longer than the disk was must show through.
    fn hide_old(&self, view: &mut ChainView, before: u64, after: u64) -> io::Result<()> {
        let cluster = self.top.geometry().cluster_len();
        let below = self.below.first().map_or(0, super::Layer::len_bytes);
        if below > before && self.top.geometry().version < 3 {
            let text = "the backing file is longer than the disk, and version 2 cannot hide it";
            return Err(io::Error::new(io::ErrorKind::Unsupported, text));
        }
        let end = after.min(below.max(before.next_multiple_of(cluster)));
        let how = Clear::Zero { may_unmap: true };
        // It is beyond the disk's old end: no request touches it.
        let upto = end.next_multiple_of(cluster);
        self.clear_upto(view, &mut Scratch::default(), before..end, upto, how)
    }
}

impl Image {
    /// Makes room in the L1 table.
    fn grow_l1(&self, writer: &Writer, meta: &mut Meta, len_bytes: u64) -> Result<(), Error> {
        let needed = self.geometry().l1_entries(len_bytes);
        let old = self.l1();
        if needed <= old.entries.len() as u64 {
            return Ok(());
        }
        if needed * 8 > MAX_L1_LEN_BYTES {
            let rule = format!("at most {MAX_L1_LEN_BYTES}");
            return Err(Error::header("the length of the L1 table", needed * 8, rule));
        }
        if let Some(n) = old.entries.iter().position(|e| e.load(Ordering::Acquire) & BAD != 0) {
            return Err(Error::io("making a larger L1 table")(points_nowhere(n as u64)));
        }
        let bits = self.geometry().cluster_bits;
        let io = Error::io;
        let clusters = (needed * 8).div_ceil(1 << bits);
        let place = writer.take_row(meta, clusters).map_err(io("making a larger L1 table"))?;
        let entries: Box<[AtomicU64]> = (0..needed as usize)
            .map(|n| AtomicU64::new(old.entries.get(n).map_or(0, |e| e.load(Ordering::Acquire))))
            .collect();
        let bytes: Vec<u8> =
            entries.iter().flat_map(|e| e.load(Ordering::Relaxed).to_be_bytes()).collect();
        let offset = place << bits;
        let l1 = L1 { entries, offset };
        let written = self.store.write_at(&bytes, offset).and_then(|()| self.sync());
        written.map_err(io("writing a larger L1 table"))?;
        // First in the file: after an error entries go on to where the header says.
        let written = self.write_size(self.len_bytes(), &l1);
        // After an error the file may say so nevertheless.
        if written.is_err() && !self.has_l1_at(writer, offset) {
            return written.map_err(io("writing the place of the L1 table"));
        }
        *write(&self.l1) = Arc::new(l1);
        self.l1_generation.fetch_add(1, Ordering::Release);
        meta.metadata.add_range(place..place + clusters);
        self.sync().map_err(io("writing the place of the L1 table"))?;
        let used = old.offset >> bits;
        let used = used..used + (old.entries.len() as u64 * 8).div_ceil(1 << bits);
        meta.metadata.remove_range(&used);
        writer.release(meta, used);
        Ok(())
    }

    /// Whether the file says that the L1 table is there. An image of which that is not known is not
    /// written to any more.
    fn has_l1_at(&self, writer: &Writer, offset: u64) -> bool {
        let mut word = [0; 8];
        let result = self.store.read_padded(&mut word, place::SIZE + 16);
        if let Err(e) = &result {
            writer.mark_damaged(&format!("where its L1 table is cannot be read: {e}"));
        }
        result.is_ok() && u64::from_be_bytes(word) == offset
    }

    /// A data file may be read without the image, as a whole.
    fn grow_data(&self, len_bytes: u64) -> io::Result<()> {
        let data = &*self.data;
        if !self.geometry().data_file || !data.can_grow() || data.len()? >= len_bytes {
            return Ok(());
        }
        data.set_len(len_bytes)
    }

    /// Size of the disk, and where the L1 table is: one write within a sector.
    fn write_size(&self, len_bytes: u64, l1: &L1) -> io::Result<()> {
        let mut field = [0u8; 24];
        field[..8].copy_from_slice(&len_bytes.to_be_bytes());
        field[12..16].copy_from_slice(&(l1.entries.len() as u32).to_be_bytes());
        field[16..].copy_from_slice(&l1.offset.to_be_bytes());
        self.store.write_at(&field, place::SIZE)
    }
}
