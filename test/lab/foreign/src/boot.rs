//! From QEMU's entry (32 bits, no paging) to a stack and 64 bits, with memory mapped one to one.

use core::arch::{asm, global_asm};

/// QEMU's device with which a guest ends it (`isa-debug-exit`).
const EXIT_PORT: u16 = 0xf4;

// PVH: kernel documentation, x86/booting-pvh; the note is XEN_ELFNOTE_PHYS32_ENTRY. 1,024 pages of
// 1 GiB map all that a CPU of 40 address bits sees: firmware puts devices at its end.
global_asm!(
    r#"
    .section .note.pvh, "a", @note
    .balign 4
    .long 4, 8, 18
    .asciz "Xen"
    .quad entry

    .section .text.entry, "ax"
    .code32
    .global entry
entry:
    cli
    cld
    movl $stack_end, %esp
    movl $level3, %eax
    orl $3, %eax
    movl %eax, level4
    addl $4096, %eax
    movl %eax, level4 + 8
    xorl %ecx, %ecx
2:  movl %ecx, %eax
    shll $30, %eax
    orl $0x83, %eax
    movl %eax, level3(,%ecx,8)
    movl %ecx, %eax
    shrl $2, %eax
    movl %eax, level3 + 4(,%ecx,8)
    incl %ecx
    cmpl $1024, %ecx
    jb 2b
    movl $level4, %eax
    movl %eax, %cr3
    movl %cr4, %eax
    orl $0x20, %eax
    movl %eax, %cr4
    movl $0xc0000080, %ecx
    rdmsr
    orl $0x100, %eax
    wrmsr
    movl %cr0, %eax
    orl $0x80000001, %eax
    movl %eax, %cr0
    lgdt segments_pointer
    ljmp $8, $long_mode
    .code64
long_mode:
    movw $16, %ax
    movw %ax, %ds
    movw %ax, %es
    movw %ax, %ss
    xorl %ebp, %ebp
    call {main}
    ud2

    .section .rodata.segments, "a"
    .balign 8
segments:
    .quad 0, 0x00209a0000000000, 0x0000920000000000
segments_pointer:
    .word . - segments - 1
    .long segments

    .section .bss.tables, "aw", @nobits
    .balign 4096
level4: .skip 4096
level3: .skip 8192
    .skip 65536
stack_end:
"#,
    main = sym start,
    options(att_syntax)
);

extern "C" fn start() -> ! {
    crate::main()
}

/// Ends QEMU.
pub fn end() -> ! {
    loop {
        // SAFETY: this port has QEMU's device, which ends it, or nothing.
        unsafe { asm!("out dx, al", in("dx") EXIT_PORT, in("al") 1u8, options(nomem, nostack)) };
        // SAFETY: interrupts are off, so that the CPU stays there.
        unsafe { asm!("hlt", options(nomem, nostack)) };
    }
}
