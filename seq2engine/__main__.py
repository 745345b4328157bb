from seq2engine.cli import main

raise SystemExit(main())
