(module
  (import "millrace" "reply" (func $reply (param i32 i64 i32 i32 i32) (result i32)))
  (import "millrace" "file_open" (func $open (param i32 i32 i32) (result i32)))
  (import "millrace" "file_append" (func $append (param i32 i32 i32) (result i64)))
  (import "millrace" "file_read" (func $read (param i32 i64 i32 i32) (result i32)))
  (import "millrace" "file_list" (func $list (param i32 i32) (result i32)))
  (import "millrace" "file_len" (func $len (param i32) (result i64)))
  (memory (export "memory") 2)
  ;; The name of its file; the buffer for events begins at 64 KiB and grows as it must.
  (data (i32.const 16) "log")
  (global $file (mut i32) (i32.const -1))

  (func (export "millrace_abi") (result i32) (i32.const 1))

  (func (export "millrace_start") (result i32)
    (global.set $file (call $open (i32.const 16) (i32.const 3) (i32.const 1)))
    (if (result i32) (i32.lt_s (global.get $file) (i32.const 0))
      (then (global.get $file))
      (else (i32.const 0))))

  (func (export "millrace_buffer") (param $len i32) (result i32)
    (local $have i32)
    (local.set $have
      (i32.sub (i32.mul (memory.size) (i32.const 65536)) (i32.const 65536)))
    (if (i32.gt_u (local.get $len) (local.get $have))
      (then
        (if (i32.eq (i32.const -1)
              (memory.grow (i32.add (i32.const 1)
                (i32.div_u (i32.sub (local.get $len) (local.get $have)) (i32.const 65536)))))
          (then (return (i32.const 0))))))
    (i32.const 65536))

  (func $spin (loop $again (br $again)))

  (func $deep (call $deep) (call $deep))

  (func $grow (result i32)
    (loop $again
      (br_if $again (i32.ne (i32.const -1) (memory.grow (i32.const 1)))))
    (memory.size))

  (func $answer (param $client i32) (param $seq i64) (param $at i32) (param $len i32) (result i32)
    (local $first i32)
    (local $offset i64)
    (if (i32.eqz (local.get $len))
      (then (return (call $reply (local.get $client) (local.get $seq) (i32.const 0)
                      (local.get $at) (local.get $len)))))
    (local.set $first (i32.load8_u (local.get $at)))
    (if (i32.eq (local.get $first) (i32.const 115)) (then (call $spin)))            ;; s
    (if (i32.eq (local.get $first) (i32.const 116)) (then (unreachable)))            ;; t
    (if (i32.eq (local.get $first) (i32.const 114)) (then (call $deep)))             ;; r
    (if (i32.eq (local.get $first) (i32.const 110)) (then (return (i32.const 0))))   ;; n
    (if (i32.eq (local.get $first) (i32.const 101)) (then (return (i32.const -5))))  ;; e
    (if (i32.eq (local.get $first) (i32.const 103)) (then (drop (call $grow)) (call $spin))) ;; g
    (if (i32.eq (local.get $first) (i32.const 109))                                  ;; m
      (then (i32.store (local.get $at) (call $grow))))
    (if (i32.eq (local.get $first) (i32.const 100))                                  ;; d
      (then
        (local.set $offset (call $append (global.get $file) (local.get $at) (local.get $len)))
        (i64.store (i32.const 32) (local.get $offset))
        (return (call $reply (local.get $client) (local.get $seq) (i32.const 1)
                  (i32.const 32) (i32.const 8)))))
    (if (i32.eq (local.get $first) (i32.const 108))                                  ;; l
      (then
        (i64.store (i32.const 32) (call $len (global.get $file)))
        (return (call $reply (local.get $client) (local.get $seq) (i32.const 0)
                  (i32.const 32) (i32.const 8)))))
    (if (i32.eq (local.get $first) (i32.const 112))                                  ;; p
      (then
        (return (call $reply (local.get $client) (local.get $seq) (i32.const 0) (i32.const 48)
                  (call $read (global.get $file) (i64.const 0) (i32.const 48) (i32.const 16))))))
    (if (i32.eq (local.get $first) (i32.const 102))                                  ;; f
      (then
        (return (call $reply (local.get $client) (local.get $seq) (i32.const 0) (i32.const 48)
                  (call $list (i32.const 48) (i32.const 16))))))
    (if (i32.eq (local.get $first) (i32.const 120))                                  ;; x
      (then (drop (call $reply (local.get $client) (local.get $seq) (i32.const 0)
                    (local.get $at) (local.get $len)))))
    (drop (call $reply (local.get $client) (local.get $seq) (i32.const 0)
            (local.get $at) (local.get $len)))
    (i32.const 0))

  (func (export "millrace_serve") (param $len i32) (result i32)
    (local $at i32)
    (local $end i32)
    (local $body i32)
    (local $result i32)
    (local.set $at (i32.const 65536))
    (local.set $end (i32.add (i32.const 65536) (local.get $len)))
    (block $done
      (loop $next
        (br_if $done (i32.ge_u (local.get $at) (local.get $end)))
        (local.set $body (i32.load (local.get $at)))
        (if (i32.eq (i32.load16_u offset=4 (local.get $at)) (i32.const 2))
          (then
            (local.set $result
              (call $answer (i32.load offset=8 (local.get $at)) (i64.load offset=16 (local.get $at))
                (i32.add (local.get $at) (i32.const 24)) (local.get $body)))
            (if (i32.lt_s (local.get $result) (i32.const 0)) (then (return (local.get $result))))))
        (local.set $at
          (i32.add (local.get $at)
            (i32.add (i32.const 24)
              (i32.and (i32.add (local.get $body) (i32.const 7)) (i32.const -8)))))
        (br $next)))
    (i32.const 0)))
