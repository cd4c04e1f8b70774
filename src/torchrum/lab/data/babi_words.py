"""The vocabularies of the bAbI tasks: a trained model can be asked without the files. A test compares them."""

WORDS = (
    # task 1
    ". ? Daniel John Mary Sandra Where back bathroom bedroom garden hallway is journeyed kitchen moved office the "
    "to travelled went ",
    # task 2
    ". ? Daniel John Mary Sandra Where apple back bathroom bedroom discarded down dropped football garden got "
    "grabbed hallway is journeyed kitchen left milk moved office picked put the there to took travelled up went ",
    # task 3
    ". ? Daniel John Mary Sandra Where apple back bathroom bedroom before discarded down dropped football garden "
    "got grabbed hallway journeyed kitchen left milk moved office picked put the there to took travelled up was "
    "went ",
    # task 4
    ". ? The What bathroom bedroom east garden hallway is kitchen north of office south the west ",
    # task 5
    ". ? Bill Fred Jeff Mary What Who apple back bathroom bedroom did discarded down dropped football garden gave "
    "give got grabbed hallway handed journeyed kitchen left milk moved office passed picked put received the "
    "there to took travelled up went ",
    # task 6
    ". ? Daniel Is John Mary Sandra apple back bathroom bedroom discarded down dropped football garden got "
    "grabbed hallway in journeyed kitchen left milk moved no office picked put the there to took travelled up "
    "went yes ",
    # task 7
    ". ? Daniel How John Mary Sandra apple back bathroom bedroom carrying discarded down dropped football garden "
    "gave got grabbed hallway handed is journeyed kitchen left many milk moved none objects office one passed "
    "picked put the there three to took travelled two up went ",
    # task 8
    ". ? Daniel John Mary Sandra What apple apple,football apple,football,milk apple,milk apple,milk,football "
    "back bathroom bedroom carrying discarded down dropped football football,apple football,apple,milk "
    "football,milk football,milk,apple garden got grabbed hallway is journeyed kitchen left milk milk,apple "
    "milk,apple,football milk,football milk,football,apple moved nothing office picked put the there to took "
    "travelled up went ",
    # task 9
    ". ? Daniel Is John Mary Sandra back bathroom bedroom garden hallway in is journeyed kitchen longer moved no "
    "not office the to travelled went yes ",
    # task 10
    ". ? Bill Fred Is Julie Mary back bedroom cinema either in is journeyed kitchen maybe moved no office or park "
    "school the to travelled went yes ",
    # task 11
    ". ? After Afterwards Daniel Following John Mary Sandra Then Where back bathroom bedroom garden hallway he is "
    "journeyed kitchen moved office she that the to travelled went ",
    # task 12
    ". ? Daniel John Mary Sandra Where and back bathroom bedroom garden hallway is journeyed kitchen moved office "
    "the to travelled went ",
    # task 13
    ". ? After Afterwards Daniel Following John Mary Sandra Then Where and back bathroom bedroom garden hallway "
    "is journeyed kitchen moved office that the they to travelled went ",
    # task 14
    ". ? Bill Fred Julie Mary This Where Yesterday afternoon back bedroom before cinema evening journeyed kitchen "
    "morning moved office park school the this to travelled was went yesterday ",
    # task 15
    ". ? Cats Emily Gertrude Jessica Mice Sheep What Winona Wolves a afraid are cat cats emily gertrude is "
    "jessica mice mouse of sheep winona wolf wolves ",
    # task 16
    ". ? Bernhard Brian Greg Julius Lily What a color frog gray green is lion rhino swan white yellow ",
    # task 17
    ". ? Is The above below blue is left no of pink rectangle red right sphere square the to triangle yellow yes ",
    # task 18
    ". ? Does Is The bigger box chest chocolate chocolates container fit fits in inside is no of suitcase than "
    "the yes ",
    # task 19
    ". ? How The bathroom bedroom do e,e e,n e,s east from garden go hallway is kitchen n,e n,n n,w north of "
    "office s,e s,s s,w south the to w,n w,s w,w west you ",
    # task 20
    ". ? Antoine Jason Sumit Where Why Yann antoine apple back bedroom bored did football garden get go got "
    "grabbed hungry is jason journeyed kitchen milk moved pajamas picked sumit the there thirsty tired to took "
    "travelled up went will yann ",
)
"""Words, punctuation and answers of tasks 1 to 20, sorted; each a string with spaces between them."""
