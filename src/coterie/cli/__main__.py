from coterie.cli import main

main()
